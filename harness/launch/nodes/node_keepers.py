"""Keepers of checkpoints in memory on nodes: implements
``recovery.checkpoint.memory.housing.Housing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recovery.checkpoint.memory.keeper import KeeperConfig
from recovery.process.local import Report
from recovery.transport.wire import Message

if TYPE_CHECKING:
    from harness.launch.nodes.cluster import NodesCluster


class NodeKeepers:
    """One keeper a node, a process of its agent as any other. ``reports``: what the cluster has
    heard of keepers.
    """

    def __init__(self, cluster: NodesCluster) -> None:
        self._cluster = cluster
        self._names: set[str] = set()
        self.reports: list[Report] = []
        self.address = cluster.address
        self.alive = cluster.alive
        self.signal = cluster.signal
        self.os_state = cluster.os_state

    def owns(self, process: str) -> bool:
        """Whether it is, or was, a keeper."""
        return process in self._names

    def takes(self, node: int) -> bool:
        """Whether its agent is there."""
        return node in self._cluster.usable()

    def start(self, process: str, config: KeeperConfig) -> int:
        """Have the agent start it."""
        self._names.add(process)
        told = {**config.model_dump(mode="json"), "log": self._cluster.output(config.node, process)}
        return self._cluster.start(process, config.node, told)

    def send(self, process: str, message: Message) -> bool:
        """By its agent."""
        return self._cluster.send(process, message)

    def wait(self, timeout_s: float) -> list[Report]:
        """Whatever was heard; what concerns others is left to them."""
        if not self.reports:
            self._cluster.hear(timeout_s)
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> dict[int, str]:
        """They end with the arm."""
        return {}
