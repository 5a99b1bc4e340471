"""Maps the processes of a command to ranks, even if several replica groups each count from 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen.progress import ProgressReport
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.alike import Alike
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.trainer import Trainer
from trainchaos.harness.script.processes.tree import FoundRank


class RollCall:
    """The ranks of one arm's command. ``output``: file with the command's output."""

    def __init__(self, spec: WorkloadSpec, output: Path) -> None:
        self._spec, self._output = spec, output
        self._trainer, self._alike = Trainer(), Alike()
        self._ranks: dict[int, int] = {}  # by pid, for all processes found
        self._size, self._launched = 1, False

    def find(
        self, command: Command, hints: Mapping[int, int], *, spoken: bool
    ) -> dict[int, FoundRank]:
        """Rank -> its process. ``hints``: pid -> rank, from the processes' reports; ``spoken``:
        steps have been reported.
        """
        found = tree.find_ranks(
            command.guard_pid,
            self._spec.ranks,
            hints,
            command.pid,
            group=self._spec.group,
            launched=self._launched,
            choose=lambda top, rows: self._trainer.of(top, rows, self._printed(), settled=spoken),
            alike=lambda rows: self._alike.of(rows, self._spec.ranks, settled=spoken),
        )
        self._launched = self._launched or any(one.in_group for one in found.values())
        self._ranks |= {one.pid: rank for rank, one in found.items()}
        self._size = max((one.size for one in found.values()), default=self._size)
        return found

    def whose(self, said: ProgressReport) -> ProgressReport:
        """The report with its process's rank in the whole job: the reported rank counts within its
        group, and a process may report before it knows its rank.
        """
        if self._spec.group is None:
            if said.rank is None and said.pid is not None and self._spec.ranks > 1:
                return replace(said, rank=self._ranks.get(said.pid))
            return said
        if said.pid is not None:
            return replace(said, rank=self._ranks.get(said.pid))
        rank = None if said.group is None else said.group * self._size + (said.rank or 0)
        return replace(said, rank=rank)

    def _printed(self) -> int:
        try:
            return self._output.stat().st_size
        except OSError:
            return 0
