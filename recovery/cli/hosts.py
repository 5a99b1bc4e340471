"""Where the processes of a supervised script run: on this machine, or on nodes with agents."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError, NoPlaceLeft
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.detection.silence import PacedLook
from trainchaos.recovery.health.service import HealthService
from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.nodes.coordinator.fleet import Fleet
from trainchaos.recovery.nodes.coordinator.node_state import NodeInfo
from trainchaos.recovery.nodes.coordinator.software import refuse_other
from trainchaos.recovery.nodes.host import FleetHost
from trainchaos.recovery.nodes.link.beat_rate import ping_s
from trainchaos.recovery.process.local import LocalHost, script_recipe
from trainchaos.recovery.process.output import say
from trainchaos.recovery.process.processes import become_subreaper
from trainchaos.recovery.rank.script import ScriptConfig

READY_LIMIT_S = 300.0  # agents may be started by hand
# for agents to reconnect to a restarted coordinator: they try at least every second
RETURN_LIMIT_S = 10.0
HEARD_PINGS = 1.0  # a node that was silent for longer is tried after the others
LOGS = "logs"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a process finds where it starts. ``device``: as torch names it; ``address``: where a
    rank there listens, "": on the loopback interface; ``events``: directory for its event log;
    ``logs``: for its output, None: the supervisor's output.
    """

    device: str
    address: str
    events: Path
    logs: Path | None


Configure = Callable[[str, str, Surroundings], ScriptConfig]
"""The configuration of a process, by its name and role."""


class LocalScripts(LocalHost):
    """``devices``: to assign; ``events``, ``logs``: as in ``Surroundings``; ``health``: of this
    machine, closed with this. This process becomes a child subreaper.
    """

    configure: Configure

    def __init__(
        self, devices: Sequence[str], events: Path, logs: Path | None, health: HealthService
    ) -> None:
        become_subreaper()
        recipe = script_recipe()
        super().__init__(recipe.server(), recipe, devices)
        self.fork, self.logs = self._server.fork, logs
        self._events, self._health = events, health

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        self._server.await_ready()
        self._health.start()

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """Nothing can be taken over: processes of this machine end with their supervisor."""
        raise InfrastructureError(
            "ranks of one machine end with their supervisor",
            hint="start the job anew, with another --events",
        )

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        there = Surroundings(device=device, address="", events=self._events, logs=self.logs)
        config = self.configure(name, role, there).model_copy(update={"parent": os.getpid()})
        data = config.model_dump_json().encode()
        return self.start(name, data, mode=mode, log=self._events / f"{name}.jsonl")

    def may_return(self) -> bool:
        return False

    def hardware(self) -> Sequence[Sign]:
        for problem in self._health.problems():
            say(f"health: {problem}")
        signs = self._health.take()
        return [s if s.node is not None else s.model_copy(update={"node": 0}) for s in signs]

    def close(self) -> dict[int, str]:
        """End everything, the fork server too."""
        self._health.close()
        left = super().close()
        self._server.close()
        return left


class FleetScripts(FleetHost):
    """``nodes``: their number; ``size``: processes that the job begins with; ``device``: ``auto``,
    ``cpu`` or ``cuda``; ``events``: local directory for all event logs, with the output of ranks
    below ``logs``; ``avoided``: places that are tainted.
    """

    configure: Configure

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
        super().__init__(fleet)
        self.store_host = fleet.address[0]
        self.close = fleet.close
        self._numbers, self._size = range(nodes), size
        self._heard_s = HEARD_PINGS * ping_s(nodes)
        self._slots = math.ceil(size / nodes)
        self._device, self._events, self._avoided = device, events, avoided
        self._known: Mapping[int, NodeInfo] = {}

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        """Wait until an agent has connected for each node, or ``stopped``. Raises
        InfrastructureError.
        """
        host, port = self.fleet.address
        say(f"{len(self._numbers)} agents are to dial {host}:{port}")
        self.fleet.await_nodes(
            self._numbers, limit_s=READY_LIMIT_S, gone=_nothing_known, stopped=stopped
        )
        self.fleet.begin("", self._events)
        for info in self.fleet.nodes().values():
            refuse_other(info)
        if stopped():  # before all agents had come
            return
        spots = [(node, device) for node in self._meet() for device in self.places_on(node)]
        self._avoided.refuse_shortage(spots, self._size)

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """Take over processes; agents that do not come back soon are lost: within RETURN_LIMIT_S
        of the last one that did, as many that come at once take their time.
        """
        self.fleet.inherit(self._events, processes)
        arrivals = _Arrivals(self.fleet.present)
        with suppress(InfrastructureError):
            self.fleet.await_nodes(
                self._numbers, limit_s=READY_LIMIT_S, gone=_nothing_known, stopped=arrivals.over
            )
        there = {state.node for state in self.fleet.present()}
        for node in sorted({node for node, _ in processes.values()} - there):
            self.fleet.forsake(
                node, f"its agent was not back {RETURN_LIMIT_S:g} s after the coordinator"
            )
        self._meet()  # which of them are tainted is logged

    def usable(self) -> Collection[int]:
        """All nodes heard lately, or else those that may come back."""
        left = [info for info in self._meet().values() if not info.lost]
        there = [info for info in left if info.connected and info.silent_s < self._heard_s] or left
        if not there:
            raise NoPlaceLeft("no node is left", hint="start agents, and the job again")
        bare = sorted(i.node for i in there if self._device == "cuda" and not _gpus(i))
        if bare:
            raise InfrastructureError(f"no NVIDIA GPU on node {', '.join(map(str, bare))}")
        return [info.node for info in there]

    def places_on(self, node: int) -> Sequence[str]:
        """Its GPUs; on the CPU as many slots as it has processes at first."""
        gpus = _gpus(self._known[node]) if self._device != "cpu" else []
        return gpus or ["cpu"] * self._slots

    def _meet(self) -> Mapping[int, NodeInfo]:
        """All nodes, which may be others than before."""
        self._known = self.fleet.nodes()
        self._avoided.hosts_are({info.node: info.host for info in self._known.values()})
        return self._known

    def may_return(self) -> bool:
        """Whether a node is not given up. Each is asked only within the bounds of the fleet."""
        return any(not info.lost for info in self.fleet.nodes().values())

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        self.ask(name, role, mode, device, node)
        return self.started(name, node)

    def ask(self, name: str, role: str, mode: str, device: str, node: int) -> None:
        """Have a process started by the node's agent; ``started`` follows. Raises as ``spawn``."""
        info = self._known[node]
        scratch = Path(info.scratch)
        there = Surroundings(
            device=device, address=info.address, events=scratch, logs=scratch / LOGS
        )
        config = self.configure(name, role, there).model_dump(mode="json")
        self.ask_for(name, node, config, mode=mode, log=f"{name}.jsonl")


ScriptHost = LocalScripts | FleetScripts
"""A host that runs a script; ``configure`` is set by the supervisor."""


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


def _gpus(info: NodeInfo) -> list[str]:
    return [name for name in info.devices if name.startswith("cuda")]


def _nothing_known(node: int) -> str | None:
    return None
