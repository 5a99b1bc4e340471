"""Ranks in containers of this machine, one container a node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import ClassVar

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.chaos.schedule.blast import Privilege
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.containers.settings import RANK_MIB, Settings
from trainchaos.harness.launch.launcher import Launcher, Session
from trainchaos.harness.launch.nodes.platform import Platform, PlatformNeeds


class Docker(Settings, Launcher):
    """One container a node, each with its own address on a network of the run.

    ``image``: that has Python, this package and the same torch; "": none, the nodes run this
    machine's Python; ``python``: of that image; ``cpus``, ``memory_mib``, ``shm_mib``: of each
    node, at most; ``gpus``: devices of each node, "all": every node sees all of them; ``subnet``:
    of the run's network, "": one that is free; ``outside``: nodes reach what is beyond this
    machine; ``mounts``: more directories that nodes see, at the same place, read-only.
    """

    offers: ClassVar[frozenset[Need]] = frozenset(
        {
            Need.STORE_PROCESS,
            Need.COORDINATOR_PROCESS,
            Need.NODES,
            Need.LINKS,
            Need.MACHINES,
            Need.MEMORY,
            Need.QUOTA,
            Need.MOUNT,
        }
    )
    real: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    costs: ClassVar[Mapping[Need, Privilege]] = MappingProxyType(
        {
            Need.LINKS: "net_admin",
            Need.MACHINES: "net_admin",
            Need.MEMORY: "none",
            Need.QUOTA: "none",
            Need.MOUNT: "root",
        }
    )

    def lacks(self, need: Need) -> str | None:
        """Privileges and tools of this machine."""
        from trainchaos.harness.launch.containers.links import lacks_links
        from trainchaos.harness.launch.storage import lacks_mount

        if need in (Need.LINKS, Need.MACHINES):
            return lacks_links()
        return lacks_mount() if need is Need.MOUNT else None

    def session(self, cells: Sequence[Cell], run: RunDirectory) -> AbstractContextManager[Session]:
        """Make the network and start a container for each node."""
        from trainchaos.harness.launch.nodes.cluster import nodes_session

        return nodes_session(cells, run, self._platform)

    def check(self, cell: Cell) -> None:
        """Memory that its ranks cannot live in, devices that no node would see, directories that
        are not there.
        """
        workload, launcher = cell.scenario.workload, cell.scenario.launcher
        most = -(-workload.ranks // launcher.nodes)
        needed = (most + 1) * RANK_MIB
        if self.memory_mib is not None and self.memory_mib < needed:
            raise ScenarioError(
                f"launcher.params.memory_mib {self.memory_mib}: a node of {most} ranks needs"
                f" {needed} or more",
                hint="give nodes more memory, or divide the ranks over more nodes",
            )
        if workload.device == "cuda" and not self.gpus:
            raise ScenarioError(
                "workload.device is cuda, and the nodes of launcher docker see no GPU",
                hint=(
                    "say how many each node gets, launcher: {kind: docker, params: {gpus: 1}},"
                    " or all"
                ),
            )
        for place in self.mounts:
            if not os.path.isdir(place):
                raise ScenarioError(
                    f"launcher.params.mounts: {place} is no directory of this machine"
                )

    def missing(self, cell: Cell) -> str | None:
        """What this machine lacks: devices, cores, memory, an engine."""
        from trainchaos.harness.host.container_engine import lacks_engine
        from trainchaos.harness.launch.devices import cuda_devices, missing
        from trainchaos.harness.launch.nodes.untainted import lacks_untainted

        if isinstance(self.gpus, int) and self.gpus:
            nodes, here = cell.scenario.launcher.nodes, len(cuda_devices())
            if here < nodes * self.gpus:
                return (
                    f"{nodes} nodes with {self.gpus} GPUs each need {nodes * self.gpus}, this"
                    f" machine has {here}"
                )
        return missing(cell) or lacks_engine() or lacks_untainted(cell)

    def _platform(self, wanted: PlatformNeeds) -> Platform:
        from trainchaos.harness.launch.containers.platform import DockerPlatform

        return DockerPlatform(wanted, self)
