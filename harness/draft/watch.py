"""Runs a command for a moment, as an arm does, and notes what it shows: lines, reports, ranks and
files.

Guard, scratch directory and environment are those of an arm (``harness.script.processes``), so that
what is found here is what a run will find. However it ends, no process of the command is left.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.harness.draft.command import Ran
from trainchaos.harness.draft.files import Changes, FileHistory, Listing, open_for_writing
from trainchaos.harness.script.listen.outputlog import OutputLog
from trainchaos.harness.script.listen.progress import BeaconReader, GrowingFile, ProgressReport
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.command import Command, CommandEnded
from trainchaos.harness.script.processes.environment import PreparedCommand
from trainchaos.harness.script.processes.finding import FoundRank, busiest, find_named
from trainchaos.harness.script.processes.leftovers import CommandLeftovers
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import KillSession
from trainchaos.recovery.supervise.supervision import StopFlag

TICK_S = 0.05
LOOK_EVERY_S = 0.5  # at processes and their files
JUDGE_EVERY_S = 1.0
TERM_GRACE_S = 3.0
LOOKS_AT_ONCE = 16
LOOKS_AT_END = 256
KEPT_LINES = 5000
KEPT_REPORTS = 20_000
LONGER = 3.0
"""How many times as long as asked the first step is waited for: a start may well take longer than
what has to be seen of the steps.
"""
MOST_RAN = 200
"""Different command lines that are kept."""


@dataclass(kw_only=True)
class Sighting:
    """What was seen of a command."""

    lines: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """The newest, each with the seconds since the start at which it came."""
    count: int = 0
    """Of all lines."""
    printed: int = 0
    """Bytes."""
    reports: deque[ProgressReport] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    first_report_s: float | None = None
    ranks: dict[int, FoundRank] = field(default_factory=dict)
    """The most that were there at once."""
    hinted: bool = False
    """They were known by their beacons alone."""
    grouped: bool = False
    """They were known by their replica groups."""
    alike: int = 0
    """How many that nothing names were started alike and meet each other."""
    ran: Ran = field(default_factory=dict)
    together: int = 0
    """The most different command lines that were there at once."""
    scratch: Path | None = None
    saved: list[Path] = field(default_factory=list)
    """Files that lie there at the end."""
    wrote: list[Path] = field(default_factory=list)
    """Files that were written elsewhere, and are there at the end."""
    opened: set[Path] = field(default_factory=set)
    """Files that were open for writing at some time."""
    before: Listing = field(default_factory=dict)
    files: dict[Path, FileHistory] = field(default_factory=dict)
    """Those that changed, in the directory, in scratch and in places that the command names."""
    ended: CommandEnded | None = None
    remains: list[str] = field(default_factory=list)
    """Names of processes that outlived a command that ended well."""
    seconds: float = 0.0
    error: str = ""
    """Why it could not be started."""
    left: int = 0
    """Processes that could not be killed."""


Enough = Callable[[Sighting], bool | None]
"""None: no step was seen yet; True: enough was seen."""


class Watch:
    """One watch of a command. ``group``: the variable that may name replica groups; ``places``:
    where it may write besides its directory and scratch.
    """

    def __init__(
        self, prepared: PreparedCommand, *, group: str, ledger: Ledger, places: Iterable[Path] = ()
    ) -> None:
        self._prepared, self._group, self._ledger = prepared, group, ledger
        self._output = GrowingFile(prepared.output)
        self._kept = OutputLog(prepared.output)
        self._beacon_file = GrowingFile(prepared.reports)
        self._beacon = BeaconReader(self._beacon_file)
        self._leftovers = CommandLeftovers()
        self._hints: dict[int, int] = {}
        self._ticks = 0  # of the processes alike that have worked most
        self._changes = Changes([prepared.directory, prepared.scratch, *places])
        self.seen = Sighting(
            scratch=prepared.scratch, before=self._changes.before, files=self._changes.files
        )

    def run(self, for_s: float, enough: Enough, stop: StopFlag) -> Sighting:
        """Start the command, watch its steps until enough was seen, for ``for_s`` at most, and end
        it.
        """
        seen = self.seen
        with self._started() as command:
            if command is None:
                return seen
            began = look_s = judge_s = time.monotonic()
            first_s: float | None = None
            while not stop.signum:
                _await(command, TICK_S)
                command.look()
                now = time.monotonic()
                seen.seconds = now - began
                self._listen()
                if now >= look_s or command.ended is not None:
                    look_s = now + LOOK_EVERY_S
                    self._look(command)
                if command.ended is not None:
                    break
                if now >= judge_s:
                    judge_s = now + JUDGE_EVERY_S
                    state = enough(seen)
                    if state is not None and first_s is None:
                        first_s = seen.seconds
                    limit_s = for_s * LONGER if first_s is None else first_s + for_s
                    if state or seen.seconds > limit_s:
                        break
            seen.ended = command.ended
            if command.ended is not None and command.ended.well:
                left = self._leftovers.processes(command.guard_pid, command.pid)
                seen.remains = sorted({str(one["name"]) for one in left})
        self._listen(to_end=True)
        self._changes.look(seen.seconds, at_once=True)
        scratch = self._prepared.scratch
        for path in sorted(path for path in {*seen.files, *seen.opened} if path.is_file()):
            (seen.saved if path.is_relative_to(scratch) else seen.wrote).append(path)
        return seen

    @contextmanager
    def _started(self) -> Iterator[Command | None]:
        """The command; None if it could not be started. Everything it started is ended."""
        prepared = self._prepared
        command = Command.start(
            prepared.argv, directory=prepared.directory, env=prepared.env, output=prepared.output
        )
        try:
            if command.error:
                self.seen.error = command.error
                yield None
                return
            undo = self._ledger.will(KillSession.of(command.guard_pid, "guard of the command"))
            yield command
        finally:
            self._end(command)
        if not self.seen.left:
            self._ledger.undone(undo, "ended")

    def _end(self, command: Command) -> None:
        deadline = time.monotonic() + TERM_GRACE_S
        if command.pid and command.ended is None:
            command.terminate()
            while command.ended is None and time.monotonic() < deadline:
                _await(command, TICK_S)
                command.look()
        self.seen.left = command.close(self._prepared.mark)
        self._leftovers.memory()

    def _listen(self, *, to_end: bool = False) -> None:
        seen = self.seen
        most = LOOKS_AT_END if to_end else LOOKS_AT_ONCE  # of a flood only a part is read
        for _ in range(min(self._output.looks_left(), most)):
            seen.lines.extend((seen.seconds, line) for line in self._output.read())
        if to_end and seen.ended is not None:  # it wrote all it had
            rest = self._output.unended(over=True, sure=True)
            seen.lines.extend((seen.seconds, line) for line in rest)
        seen.count, seen.printed = self._output.count, self._output.taken
        self._kept.cut(self._output.taken)
        for report in self._beacon.read():
            if report.pid is not None and report.rank is not None:
                self._hints[report.pid] = report.rank
            if report.busy_s is None:
                seen.reports.append(report)
        if seen.reports and seen.first_report_s is None:
            seen.first_report_s = seen.seconds

    def _look(self, command: Command) -> None:
        """At its processes: ranks, open files, shared memory."""
        seen, rows = self.seen, tree.below(command.guard_pid)
        seen.opened |= open_for_writing(rows)
        self._changes.look(seen.seconds)
        now = running(rows)
        seen.together = max(seen.together, len(now))
        if len(seen.ran) < MOST_RAN:
            seen.ran = {**seen.ran, **now}
        self._leftovers.look(command.guard_pid, lambda pid: None)
        grouped = bool(self._group) and any(self._group in tree.environment(pid) for pid in rows)
        group_name = self._group if grouped else None
        found = find_named(command.guard_pid, self._hints, group=group_name)
        group, ticks = busiest(rows) if not found else ([], 0)
        if ticks > self._ticks:
            self._ticks, seen.alike = ticks, len(group)
        if len(found) >= len(seen.ranks) and found:
            seen.ranks, seen.grouped = found, grouped
            hinted = (one.pid in self._hints and one.world is None for one in found.values())
            seen.hinted = all(hinted)

    def close(self) -> None:
        """Close the files."""
        self._output.close()
        self._beacon_file.close()
        self._kept.close()


def _await(command: Command, limit_s: float) -> None:
    """Until there is news of the command; a command that has ended has no more to tell."""
    if command.ended is None:
        poll = select.poll()
        poll.register(command.fileno(), select.POLLIN)
        poll.poll(limit_s * 1000)


def running(pids: Iterable[int]) -> Ran:
    """Of these processes, as far as this user may see."""
    found: dict[tuple[str, ...], Path] = {}
    for pid in pids:
        words = tuple(tree.command_line(pid).removesuffix("\0").split("\0"))
        try:
            place = Path(os.readlink(f"/proc/{pid}/cwd"))
        except OSError:
            continue
        if words[0] and len(found) < MOST_RAN:
            found.setdefault(words, place)
    return found
