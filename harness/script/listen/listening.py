"""Hears what a command says: its output and its beacon, and holds reports back until it is known
who is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from chaos.scenario.workload import WorkloadSpec
from harness.script.listen.outputlog import OutputLog
from harness.script.listen.progress import (
    BeaconReader,
    GrowingFile,
    ProgressReader,
    ProgressReport,
    RegexReader,
)
from harness.script.processes.environment import PreparedCommand

PENDING_S = 3.0  # reports wait so long for all ranks to be found
LOOKS_AT_ONCE = 8  # a flood of output must not keep the arm from its other work
NS = 1e9


class CommandListener:
    """The voices of one arm's command. ``hints``: pid -> rank, as the processes themselves say."""

    def __init__(
        self, spec: WorkloadSpec, prepared: PreparedCommand, now_ns: Callable[[], int]
    ) -> None:
        self._now_ns = now_ns
        self._output, self._reports = GrowingFile(prepared.output), GrowingFile(prepared.reports)
        self._kept = OutputLog(prepared.output)
        self._reader: ProgressReader = (
            BeaconReader(self._reports)
            if spec.progress == "beacon"
            else RegexReader(self._output, spec.progress.regex)
        )
        self.hints: dict[int, int] = {}
        self._knows_itself = (
            spec.ranks == 1 or spec.group is not None
        )  # whoever speaks is the one, of its group
        self._pending: list[ProgressReport] = []
        self._pending_ns = 0
        self._look_ns = now_ns()

    @property
    def source(self) -> str:
        """``beacon`` or ``output``."""
        return self._reader.source

    @property
    def refused(self) -> int:
        """Reports that made no sense."""
        return self._reader.refused

    @property
    def lines(self) -> int:
        """Lines of output so far."""
        return self._output.count

    @property
    def last(self) -> tuple[str, ...]:
        """The newest lines of the output."""
        return tuple(self._output.last)

    def raised(self) -> list[str]:
        """Lines of output since the last call that tell of an exception raised at a point."""
        lines = list(self._output.raised)
        self._output.raised.clear()
        return lines

    @property
    def waiting(self) -> bool:
        """Whether there are reports that nobody took yet."""
        return bool(self._pending)

    def listen(self, *, to_end: bool = False) -> None:
        """Take in what was said since the last time, of a flood a part. ``to_end``: all that is
        there now.
        """
        if self._reader.source == "beacon":
            for _ in self._looks(self._output, to_end):
                for _ in self._output.read():  # its last lines are kept, for when it goes wrong
                    pass
        lines = self._reports if self._reader.source == "beacon" else self._output
        found = self._timed(
            [one for _ in self._looks(lines, to_end) for one in self._reader.read()]
        )
        self._kept.cut(self._output.taken)
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
        """The reports that waited, in the order in which they were made. ``pids``: of these
        processes only, and with ``beyond`` of those that say not whose they are the first, as long
        as each is of a later step than the last.
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
        self._output.close()
        self._reports.close()
        self._kept.close()

    @staticmethod
    def _looks(lines: GrowingFile, to_end: bool) -> range:
        return range(lines.looks_left() if to_end else min(lines.looks_left(), LOOKS_AT_ONCE))

    def _timed(self, found: list[ProgressReport]) -> list[ProgressReport]:
        """Lines of the output bear no time: those of one look were written one after the other
        since the last.
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
