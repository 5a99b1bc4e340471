"""Processes on nodes with agents, as a host: most of ``recovery.process.host.Host``. Who needs one
adds ``spawn`` and says which nodes are usable.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.nodes.coordinator.fleet import Fleet
from trainchaos.recovery.nodes.coordinator.node_events import event_of
from trainchaos.recovery.nodes.coordinator.node_state import (
    FleetReport,
    NodeChecked,
    NodeEvent,
    NodeFound,
    NodeGone,
    NodeWarned,
)
from trainchaos.recovery.nodes.coordinator.place_checks import NodeChecks
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived, NodeNews, Report


class FleetHost:
    """``fleet``: may outlive this. ``checks``: of suspect places, by the agents."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.alive, self.send, self.signal = fleet.alive, fleet.send, fleet.signal
        self.mark, self.os_state = fleet.mark, fleet.os_state  # asked for each rank in each look
        self.stacks, self.pulse = fleet.stacks, fleet.pulse
        self.checks = NodeChecks(fleet.check)
        self._reports: list[Report] = []
        self._news: list[NodeNews] = []
        self._signs: list[Sign] = []

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def pid(self, name: str) -> int | None:
        """None: it runs on another machine, or in another container."""
        return None

    def ask_for(
        self, name: str, node: int, config: Mapping[str, Any], *, mode: str, log: str
    ) -> None:
        """Have a node's agent start a process; ``started`` follows. Raises InfrastructureError;
        ConnectionError if the node is lost.
        """
        try:
            self.fleet.ask_for(name, node, config, mode=mode, log=log)
        except NodeGone as error:
            raise ConnectionError(error.message) from error

    def started(self, name: str, node: int) -> int:
        """The pid of a process that was asked for. Raises as ``ask_for``."""
        try:
            return self.fleet.started(name, node)
        except NodeGone as error:
            raise ConnectionError(error.message) from error

    def wait(self, timeout_s: float) -> list[Report]:
        """Reports of processes; what nodes say is kept for ``news`` and ``hardware``."""
        self.hear(0.0 if self._reports else timeout_s)
        reports, self._reports = self._reports, []
        return reports

    def hear(self, timeout_s: float) -> None:
        """Wait for reports of any node, and sort them."""
        for report in self.fleet.wait(timeout_s):
            self.sort(report)

    def sort(self, report: FleetReport) -> None:
        """Keep a report for who asks for it."""
        self.checks.hear(report)
        match report:
            case MessageReceived() | Dying() | Exited():
                self._reports.append(report)
            case NodeFound(sign=sign):
                self._signs.append(sign)
            case NodeChecked() | NodeWarned():
                pass  # heard above, or logged by the ranks themselves
            case _:
                self.tell(report)

    def tell(self, *events: NodeEvent) -> None:
        """Events to be recorded."""
        for event in events:
            if said := event_of(event):
                self._news.append(NodeNews(kind=said[0], data=said[1]))

    def news(self) -> Sequence[NodeNews]:
        news, self._news = self._news, []
        return news

    def hardware(self) -> Sequence[Sign]:
        """What the agents' health services found since the last call."""
        signs, self._signs = self._signs, []
        return signs
