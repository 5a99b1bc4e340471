"""Ranks on the nodes of a Slurm allocation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.host.slurm_commands import Commands, installed
from trainchaos.harness.launch.launcher import Launcher, Session
from trainchaos.harness.launch.nodes.platform import PlatformNeeds
from trainchaos.harness.launch.slurm.allocation import (
    HOW,
    Allocation,
    AllocationOptions,
    allocation,
    too_few,
    without_tainted,
)
from trainchaos.harness.launch.slurm.platform import SlurmPlatform
from trainchaos.recovery.health.taints import taints_now


class Slurm(AllocationOptions, Launcher):
    """An agent on each node of the allocation that chaos runs in.

    ``host``: address of this machine that the nodes reach, "": found out; ``drain``: a node that
    recovery quarantines is drained in Slurm, with the reason, and so is one of the allocation that
    is tainted (``chaos taint``), which is not used in any case. The rest is for ``chaos plan
    --sbatch``: ``partition``, ``account``, ``gpus_per_node``, ``cpus_per_node`` (0: one for each
    rank), ``reserve_nodes``: nodes beyond the scenario's, one of which takes over when a node is
    lost; ``grace_s``: how long before its end the job is told; ``extra``: more ``#SBATCH`` options;
    ``setup``: shell lines before chaos starts.
    """

    offers: ClassVar[frozenset[Need]] = frozenset(
        {Need.NODES, Need.STORE_PROCESS, Need.COORDINATOR_PROCESS}
    )

    host: str = ""
    drain: bool = False

    def session(self, cells: Sequence[Cell], run: RunDirectory) -> AbstractContextManager[Session]:
        """An agent on each node for the whole run."""
        from trainchaos.harness.launch.nodes.cluster import nodes_session

        return nodes_session(cells, run, self._platform)

    def missing(self, cell: Cell) -> str | None:
        """Slurm itself, an allocation, nodes in it."""
        if not installed():
            return (
                "Slurm's commands (srun, scontrol) are not on this machine: run it on a cluster's;"
                f" {HOW}"
            )
        found = self._allocation()
        if found is None:
            return f"not inside a Slurm allocation (SLURM_JOB_ID is not set): {HOW}"
        return too_few(found, cell.scenario.launcher.nodes, taints_now())

    def _platform(self, wanted: PlatformNeeds) -> SlurmPlatform:
        found = self._allocation()
        if found is None:
            raise InfrastructureError("not inside a Slurm allocation", hint=HOW)
        left, bad = without_tainted(found, taints_now())
        slurm = Commands()
        return SlurmPlatform(wanted, left, slurm, host=self.host, drain=self.drain, tainted=bad)

    def _allocation(self) -> Allocation | None:
        return allocation(os.environ, Commands())
