"""Keepers of in-memory checkpoints on nodes: implements
``recovery.checkpoint.memory.keeper_host.KeeperHost``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainchaos.recovery.checkpoint.memory.keeper import KeeperConfig
from trainchaos.recovery.process.local import Report

if TYPE_CHECKING:
    from trainchaos.harness.launch.nodes.cluster import NodesCluster


class NodeKeepers:
    """One keeper for each node, started by the node's agent like any other process. ``reports``:
    reports of keepers that the cluster received.
    """

    def __init__(self, cluster: NodesCluster) -> None:
        self._cluster = cluster
        self._names: set[str] = set()
        self.reports: list[Report] = []
        self.address = cluster.address
        self.alive = cluster.alive
        self.send = cluster.send
        self.signal = cluster.signal
        self.os_state = cluster.os_state

    def owns(self, process: str) -> bool:
        """Whether it is, or was, a keeper."""
        return process in self._names

    def takes(self, node: int) -> bool:
        """Whether the node's agent is connected."""
        return node in self._cluster.usable()

    def start(self, process: str, config: KeeperConfig) -> int:
        """Make the node's agent start a keeper."""
        self._names.add(process)
        settings = {
            **config.model_dump(mode="json"),
            "log": self._cluster.output(config.node, process),
        }
        return self._cluster.start(process, config.node, settings)

    def wait(self, timeout_s: float) -> list[Report]:
        """Reports of keepers; other reports are left to the cluster."""
        if not self.reports:
            self._cluster.hear(timeout_s)
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> dict[int, str]:
        """Nothing to do: keepers end with the arm."""
        return {}
