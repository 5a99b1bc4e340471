"""Reads a command's output and beacon, and holds reports back until its ranks are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path

from trainchaos.chaos.scenario.progress import expressions
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen.outputlog import OutputLog
from trainchaos.harness.script.listen.progress import (
    BeaconReader,
    FollowedFile,
    GrowingFile,
    ProgressReport,
    RegexReader,
)

PENDING_S = 3.0  # how long reports wait for all ranks to be found
SETTLED_S = 0.05  # a frame of a bar that nothing has followed for so long is complete
LOOKS_AT_ONCE = 1  # a flood of output must neither block the arm's other work nor fill memory
NS = 1e9


class CommandListener:
    """Output and beacon of one arm's command. ``output``: what it prints, ``reports``: its beacon,
    ``heard``: the file that is read in place of its output, if there is one; ``text``: what is
    read; ``hints``: pid -> rank, as reported by the processes.
    """

    def __init__(
        self,
        spec: WorkloadSpec,
        *,
        output: Path,
        reports: Path,
        heard: Path | None,
        now_ns: Callable[[], int],
    ) -> None:
        self._now_ns = now_ns
        self.output, self._reports = GrowingFile(output), GrowingFile(reports)
        self._kept = OutputLog(output)
        self.text = self.output if heard is None else FollowedFile(heard)
        self.reader = (
            BeaconReader(self._reports)
            if spec.progress == "beacon"
            else RegexReader(self.text, expressions(spec.progress), spec.steps)
        )
        self._heard = self._reports if spec.progress == "beacon" else self.text
        self.hints: dict[int, int] = {}
        self._knows_itself = (
            spec.ranks == 1 or spec.group is not None
        )  # every reporter is the only rank of its group
        self._pending: list[ProgressReport] = []
        self._pending_ns = 0
        self._look_ns = self._grown_ns = now_ns()

    def raised(self) -> list[str]:
        """Lines of output since the last call about an exception raised at a point."""
        lines = list(self.output.raised)
        self.output.raised.clear()
        return lines

    @property
    def behind(self) -> bool:
        """Whether there is more to read than one look takes."""
        return max(self.output.looks_left(), self._heard.looks_left()) > LOOKS_AT_ONCE

    @property
    def waiting(self) -> bool:
        """Whether there are reports that have not been taken."""
        return bool(self._pending)

    def listen(self, *, to_end: bool = False) -> None:
        """Read new output; of a flood only a part. ``to_end``: read everything there is now."""
        taken = self.output.taken
        if self._heard is not self.output:
            for _ in self._looks(self.output, to_end):
                for _ in self.output.read():  # keeps its last lines for error messages
                    pass
        found = self._timed(
            [one for _ in self._looks(self._heard, to_end) for one in self.reader.read()]
        )
        self._kept.cut(self.output.taken)
        self._hold(found)
        if self.output.taken > taken:
            self._grown_ns = self._look_ns
        elif (self._look_ns - self._grown_ns) / NS >= SETTLED_S:
            self._hold(self._as_written(self.reader.read_unended()))

    def hear_out(self, *, over: bool, sure: bool = False) -> None:
        """A process has ended: read what it wrote last, though no end of line followed. ``over``:
        none is left that may go on with that line; ``sure``: they were not killed while they wrote.
        """
        self._hold(self._as_written(self.reader.read_unended(over=over, sure=sure)))
        if over:
            for _ in self.output.unended(over=True):  # a line for error messages
                pass

    def _as_written(self, found: list[ProgressReport]) -> list[ProgressReport]:
        """Give the newest line of output the time at which it was first seen."""
        return [replace(one, time_ns=self._grown_ns) for one in found]

    def _hold(self, found: list[ProgressReport]) -> None:
        """Hold reports back until they are taken."""
        self.hints.update(
            (one.pid, one.rank or 0)
            for one in found
            if one.pid is not None and (one.rank is not None or self._knows_itself)
        )
        if found and not self._pending:
            self._pending_ns = self._now_ns()
        self._pending += found

    def overdue(self) -> bool:
        """Whether reports have waited too long for all ranks to be found."""
        return bool(self._pending) and (self._now_ns() - self._pending_ns) / NS > PENDING_S

    def take(
        self, pids: Set[int] | None = None, *, beyond: int | None = None
    ) -> Sequence[ProgressReport]:
        """The waiting reports, in the order in which they were made. ``pids``: only reports of
        these processes, plus, with ``beyond``, the first reports without a pid for as long as their
        steps increase beyond it.
        """
        waiting, self._pending = self._pending, []
        if pids is None:
            return waiting
        taken: list[ProgressReport] = []
        for one in waiting:
            goes_on = one.pid is None and beyond is not None and one.step > beyond
            if one.pid is None:
                beyond = one.step if goes_on else None
            (taken if goes_on or one.pid in pids else self._pending).append(one)
        return taken

    def close(self) -> None:
        """Close the files."""
        self.output.close()
        self.text.close()
        self._reports.close()
        self._kept.close()

    @staticmethod
    def _looks(lines: GrowingFile, to_end: bool) -> range:
        return range(lines.looks_left() if to_end else min(lines.looks_left(), LOOKS_AT_ONCE))

    def _timed(self, found: list[ProgressReport]) -> list[ProgressReport]:
        """Give lines of output a time: they have none, so those of one look are spread evenly over
        the time since the previous look.
        """
        before, now = self._look_ns, self._now_ns()
        self._look_ns = now
        share = (now - before) // max(1, len(found))
        return [
            replace(one, time_ns=now - share * (len(found) - number))
            if one.time_ns is None
            else one
            for number, one in enumerate(found, start=1)
        ]
