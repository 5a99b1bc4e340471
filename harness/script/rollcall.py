"""Finds which process is which rank of a command, also where several replica groups count from 0
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from chaos.scenario.workload import WorkloadSpec
from harness.script.listen.progress import ProgressReport
from harness.script.processes import tree
from harness.script.processes.command import Command
from harness.script.processes.trainer import Trainer
from harness.script.processes.tree import FoundRank


class RollCall:
    """The ranks of one arm's command. ``output``: of the command, a file."""

    def __init__(self, spec: WorkloadSpec, output: Path) -> None:
        self._spec, self._output = spec, output
        self._trainer = Trainer()
        self._ranks: dict[int, int] = {}  # by pid, of all that were found
        self._size = 1

    def find(
        self, command: Command, hints: Mapping[int, int], *, spoken: bool
    ) -> dict[int, FoundRank]:
        """Rank -> its process. ``hints``: pid -> rank, as the processes said; ``spoken``: steps
        were reported.
        """
        found = tree.find_ranks(
            command.guard_pid,
            self._spec.ranks,
            hints,
            command.pid,
            group=self._spec.group,
            choose=lambda top, rows: self._trainer.of(top, rows, self._printed(), settled=spoken),
        )
        self._ranks |= {one.pid: rank for rank, one in found.items()}
        self._size = max((one.size for one in found.values()), default=self._size)
        return found

    def whose(self, said: ProgressReport) -> ProgressReport:
        """The same report with the rank that its process is in the whole job: its own word counts
        in its group.
        """
        if self._spec.group is None:
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
