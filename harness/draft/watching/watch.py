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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from trainchaos.harness.draft.watching.changes import (
    Changes,
    FileHistory,
    Listing,
    listing,
    open_for_writing,
)
from trainchaos.harness.script.listen.outputlog import OutputLog
from trainchaos.harness.script.listen.progress import BeaconReader, GrowingFile, ProgressReport
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.alike import busiest
from trainchaos.harness.script.processes.command import Command, CommandEnded
from trainchaos.harness.script.processes.environment import PreparedCommand
from trainchaos.harness.script.processes.leftovers import CommandLeftovers
from trainchaos.harness.script.processes.tree import FoundRank
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
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")

Ran = Mapping[tuple[str, ...], Path]
"""Words of processes -> the directory that each had, parents before their children."""


@dataclass(kw_only=True)
class Sighting:
    """What was seen. ``lines``: the newest, each with the seconds since the start at which it came;
    ``count``: of all; ``ranks``: the most that were there at once; ``hinted``: they were known by
    their beacons alone; ``alike``: how many that nothing names were started alike and meet each
    other; ``grouped``: by their replica groups; ``opened``: files open for writing at
    some time; ``before``, ``after``: the working directory; ``files``: those that changed, there,
    in scratch and in places that the command line names; ``printed``: bytes; ``ran``: command
    lines of its processes; ``together``: how many different ones were there at last; ``meets``:
    where ranks meet, by their environments; ``error``: why it could not be started; ``remains``:
    names of processes that outlived a command that ended well.
    """

    lines: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    count: int = 0
    reports: deque[ProgressReport] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    first_report_s: float | None = None
    ranks: dict[int, FoundRank] = field(default_factory=dict)
    hinted: bool = False
    alike: int = 0
    grouped: bool = False
    opened: set[Path] = field(default_factory=set)
    before: Listing = field(default_factory=lambda: Listing(files={}))
    after: Listing = field(default_factory=lambda: Listing(files={}))
    files: dict[Path, FileHistory] = field(default_factory=dict)
    printed: int = 0
    ran: dict[tuple[str, ...], Path] = field(default_factory=dict)
    together: int = 0
    meets: dict[str, str] = field(default_factory=dict)
    saved: list[Path] = field(default_factory=list)
    scratch: Path | None = None
    remains: list[str] = field(default_factory=list)
    ended: CommandEnded | None = None
    seconds: float = 0.0
    error: str = ""
    left: int = 0

    @property
    def last(self) -> list[str]:
        """Its newest lines."""
        return [line for _, line in list(self.lines)[-12:]]


Enough = Callable[[Sighting], bool | None]
"""None: no step was seen yet; True: enough was seen."""


class Watch:
    """One watch of a command. ``group``: the variable that may name replica groups; ``places``:
    where it may write besides its directory and scratch.
    """

    def __init__(
        self,
        prepared: PreparedCommand,
        *,
        group: str,
        ledger: Ledger,
        places: Iterable[Path] = (),
    ) -> None:
        self._prepared = prepared
        self._group = group
        self._ledger = ledger
        self._output = GrowingFile(prepared.output)
        self._kept = OutputLog(prepared.output)
        self._beacon_file = GrowingFile(prepared.reports)
        self._beacon = BeaconReader(self._beacon_file)
        self._leftovers = CommandLeftovers()
        self._hints: dict[int, int] = {}
        self._ticks = 0  # of the processes alike that have worked most
        # Of two looks: in the last one a shell may be alone whose only child has just ended.
        self._counts: deque[int] = deque(maxlen=2)
        self.seen = Sighting(before=listing(prepared.directory), scratch=prepared.scratch)
        self._changes = Changes([prepared.directory, prepared.scratch, *places])
        self.seen.files = self._changes.files

    def run(self, for_s: float, enough: Enough, stop: StopFlag) -> Sighting:
        """Start the command, watch its steps until enough was seen, for ``for_s`` at most, and end
        it.
        """
        seen = self.seen
        with self._started() as command:
            if command is None:
                return seen
            began = time.monotonic()
            look_s = judge_s = began
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
        seen.after = listing(self._prepared.directory)
        seen.saved = sorted(listing(self._prepared.scratch).files)
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
        if now := running(rows):
            self._counts.append(len(now))
            seen.together = max(self._counts)
        if len(seen.ran) < MOST_RAN:
            seen.ran = {**seen.ran, **now}
        seen.meets = seen.meets or rendezvous(rows, self._prepared.env)
        self._leftovers.look(command.guard_pid, lambda pid: None)
        grouped = bool(self._group) and any(self._group in tree.environment(pid) for pid in rows)
        hints = self._hints
        # 0 expected: a command's one process counts as no rank unless something names it
        found = tree.find_ranks(
            command.guard_pid, 0, hints, command.pid, group=self._group if grouped else None
        )
        group, ticks = busiest(rows) if not found else ([], 0)
        if ticks > self._ticks:
            self._ticks, seen.alike = ticks, len(group)
        if len(found) >= len(seen.ranks) and found:
            seen.ranks, seen.grouped = found, grouped
            seen.hinted = all(one.pid in hints and one.world is None for one in found.values())

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
    return MappingProxyType(found)


def rendezvous(pids: Iterable[int], ours: Mapping[str, str]) -> dict[str, str]:
    """Where ranks meet, by the environment of the first process that says so and did not inherit
    it.
    """
    for pid in pids:
        env = tree.environment(pid)
        if all(name in env for name in RENDEZVOUS):
            found = {name: env[name] for name in RENDEZVOUS}
            if any(ours.get(name) != value for name, value in found.items()):
                return found
    return {}
