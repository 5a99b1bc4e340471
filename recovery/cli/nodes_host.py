"""Runs a supervised job on nodes with agents: implements
``recovery.cli.process_host.ProcessHost``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError, NoPlaceLeft
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.process_host import ProcessPlacement
from trainchaos.recovery.detection.paced_look import PacedLook
from trainchaos.recovery.nodes.coordinator.fleet import Fleet, FleetReport, NodeGone
from trainchaos.recovery.nodes.coordinator.node_state import NodeInfo
from trainchaos.recovery.nodes.coordinator.place_checks import NodeChecks
from trainchaos.recovery.nodes.coordinator.software import refuse_other
from trainchaos.recovery.nodes.link.beat_rate import ping_s
from trainchaos.recovery.process.output import say
from trainchaos.recovery.rank.script import ScriptConfig

READY_LIMIT_S = 300.0  # agents may be started by hand
# for agents to reconnect to a restarted coordinator: they try at least every second
RETURN_LIMIT_S = 10.0
HEARD_PINGS = 1.0  # a node that was silent for longer is tried after the others
LOGS = "logs"


class NodesProcessHost:
    """``nodes``: their number; ``size``: processes that the job begins with; ``device``: ``auto``,
    ``cpu`` or ``cuda``; ``events``: local directory for all event logs, with the output of ranks
    below ``logs``; ``avoided``: places that are tainted. ``checks``: of suspect places.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        nodes: int,
        size: int,
        device: str,
        events: Path,
        avoided: AvoidedPlaces,
    ) -> None:
        self.store_host = fleet.address[0]
        self._fleet = fleet
        self._numbers = range(nodes)
        self._heard_s = HEARD_PINGS * ping_s(nodes)
        self._slots = math.ceil(size / nodes)
        self._device = device
        self._events = events
        self._size = size
        self._avoided = avoided
        self.alive, self.send, self.signal = fleet.alive, fleet.send, fleet.signal
        self.close = fleet.close
        self.mark, self.os_state = fleet.mark, fleet.os_state  # asked for each rank in each look
        self.pulse, self.stacks = fleet.pulse, fleet.stacks
        self.checks = NodeChecks(fleet.check)

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        """Wait until an agent has connected for each node."""
        host, port = self._fleet.address
        say(f"{len(self._numbers)} agents are to dial {host}:{port}")
        self._fleet.await_nodes(
            self._numbers, limit_s=READY_LIMIT_S, gone=_nothing_known, stopped=stopped
        )
        self._fleet.begin("", self._events)
        for info in self._fleet.nodes().values():
            refuse_other(info)
        if stopped():  # before all agents had come
            return
        self._avoided.refuse_shortage(self._spots_of(self._fleet.nodes().values()), self._size)

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """Take over processes; agents that do not come back soon are lost: within RETURN_LIMIT_S
        of the last one that did, as many that come at once take their time.
        """
        self._fleet.inherit(self._events, processes)
        arrivals = _Arrivals(self._fleet.present)
        with suppress(InfrastructureError):
            self._fleet.await_nodes(
                self._numbers, limit_s=READY_LIMIT_S, gone=_nothing_known, stopped=arrivals.over
            )
        there = {state.node for state in self._fleet.present()}
        for node in sorted({node for node, _ in processes.values()} - there):
            self._fleet.forsake(
                node, f"its agent was not back {RETURN_LIMIT_S:g} s after the coordinator"
            )
        self._spots_of(self._fleet.nodes().values())  # which of them are tainted is logged

    def spots(self) -> Sequence[ProcessPlacement]:
        """Devices of all nodes heard lately, or else of those that may come back, node by node; on
        the CPU as many for each as it has at first. Tainted ones only if there are no others.
        """
        left = [info for info in self._fleet.nodes().values() if not info.lost]
        there = [info for info in left if info.connected and info.silent_s < self._heard_s] or left
        found = self._spots_of(there)
        if not found:
            raise NoPlaceLeft("no node is left", hint="start agents, and the job again")
        if self._device == "cuda" and any(spot.device == "cpu" for spot in found):
            bare = sorted({spot.node for spot in found if spot.device == "cpu"})
            raise InfrastructureError(f"no NVIDIA GPU on node {', '.join(map(str, bare))}")
        return self._avoided.left(found)

    def _spots_of(self, there: Iterable[NodeInfo]) -> list[ProcessPlacement]:
        """Devices of these nodes, tainted or not. Nodes may be others than before."""
        self._avoided.hosts_are({info.node: info.host for info in self._fleet.nodes().values()})
        found: list[ProcessPlacement] = []
        for info in there:
            cuda = [
                name for name in info.devices if name.startswith("cuda") and self._device != "cpu"
            ]
            scratch = Path(info.scratch)
            logs = scratch / LOGS
            there_are = {
                name: ProcessPlacement(
                    node=info.node, device=name, address=info.address, events=scratch, logs=logs
                )
                for name in cuda or ["cpu"]
            }
            found += [there_are[name] for name in cuda or ["cpu"] * self._slots]
        return found

    def may_return(self) -> bool:
        """Whether a node is not given up. Each is asked only within the bounds of the fleet."""
        return any(not info.lost for info in self._fleet.nodes().values())

    def start(self, name: str, spot: ProcessPlacement, config: ScriptConfig, mode: str) -> int:
        """Start a process by the node's agent."""
        self.ask_for(name, spot, config, mode)
        return self.started(name, spot)

    def ask_for(self, name: str, spot: ProcessPlacement, config: ScriptConfig, mode: str) -> None:
        """Have a process started by the node's agent; ``started`` follows."""
        told = config.model_dump(mode="json")
        try:
            self._fleet.ask_for(name, spot.node, told, mode=mode, log=f"{name}.jsonl")
        except NodeGone as error:
            raise ConnectionError(error.message) from error

    def started(self, name: str, spot: ProcessPlacement) -> int:
        """The pid of a process that was asked for."""
        try:
            return self._fleet.started(name, spot.node)
        except NodeGone as error:
            raise ConnectionError(error.message) from error

    def wait(self, timeout_s: float) -> Sequence[FleetReport]:
        """Reports on processes and nodes."""
        reports = self._fleet.wait(timeout_s)
        for report in reports:
            self.checks.hear(report)
        return reports


class _Arrivals:
    """Agents that come back. ``present``: those that are there."""

    def __init__(self, present: Callable[[], Sized]) -> None:
        self._present, self._count, self._last_s = present, 0, time.monotonic()
        self._paced = PacedLook(time.monotonic)

    def over(self) -> bool:
        """Whether none has come for RETURN_LIMIT_S."""
        self._paced.take(self._look)
        return time.monotonic() > self._last_s + RETURN_LIMIT_S

    def _look(self) -> None:
        if (count := len(self._present())) > self._count:
            self._count, self._last_s = count, time.monotonic()


def _nothing_known(node: int) -> str | None:
    return None
