"""The processes of one arm on nodes with their own agents; implements
``harness.launch.launcher.Cluster``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.base import Need
from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.launch import devices
from trainchaos.harness.launch.launcher import (
    ArmSetup,
    Leftovers,
    LinkControl,
    NodeNews,
    Report,
)
from trainchaos.harness.launch.links.client import LinkProxy
from trainchaos.harness.launch.memory import in_memory, keepers_for
from trainchaos.harness.launch.nodes.by_process import GroupsByNode, LinksByNode
from trainchaos.harness.launch.nodes.node_keepers import NodeKeepers
from trainchaos.harness.launch.nodes.untainted import tainted_at
from trainchaos.harness.launch.places.seats import shortage
from trainchaos.harness.launch.rank_setup import rank_config, strategy_for
from trainchaos.harness.launch.requirements import needs_of
from trainchaos.harness.launch.storage import mount_for
from trainchaos.harness.launch.stores import StoreKeeper
from trainchaos.harness.undo.base import Undo
from trainchaos.recovery.health.quarantine import TooFewPlaces, names_of
from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.nodes.coordinator import node_events
from trainchaos.recovery.nodes.coordinator.fleet import FleetReport, NodeGone
from trainchaos.recovery.nodes.coordinator.node_state import (
    ClockMeasured,
    NodeChecked,
    NodeFound,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NodeWarned,
    NotKept,
)
from trainchaos.recovery.nodes.coordinator.place_checks import NodeChecks
from trainchaos.recovery.nodes.coordinator.salvage import gather
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.policy.jobconfig import Exchange, NetworkAddresses, exchange_of
from trainchaos.recovery.process.local import start_store

if TYPE_CHECKING:
    from trainchaos.harness.launch.nodes.session import NodesSession

QUIET_S = 1.0


class NodesCluster:
    """One arm on the nodes of ``session``, all of which are connected. Raises
    InfrastructureError.
    """

    simulated = False

    def __init__(self, session: NodesSession, setup: ArmSetup) -> None:
        self._session = session
        self._setup = setup
        self._fleet = session.fleet
        self._platform = session.platform
        self.machines = session.platform.machines
        fleet = session.fleet
        self.away, self.back, self.pressures = fleet.away, fleet.back, fleet.pressures
        self.alive, self.send, self.signal = fleet.alive, fleet.send, fleet.signal
        self.mark, self.os_state = fleet.mark, fleet.os_state
        self.stacks, self.pulse = fleet.stacks, fleet.pulse
        self._nodes = range(setup.cell.scenario.topology.nodes)
        self._node_keepers = NodeKeepers(self)
        self._reports: list[Report] = []
        self._signs: list[Sign] = []
        self._checks = NodeChecks(self._fleet.check)
        self._news: list[NodeNews] = []
        self._logs: dict[str, tuple[int, str]] = {}  # process -> its node and its event log
        self._orphans: dict[str, tuple[int, str]] = {}  # processes whose node was lost
        self._since_ns = time.time_ns()
        self._fleet.begin(setup.id, setup.run.root.resolve())
        self._sort([*session.meanwhile, *self._fleet.wait(0)])
        session.meanwhile.clear()
        self._news = []
        for node in self._nodes:
            self._tell(*node_events.all_of(self._fleet.nodes()[node]))
        known = self._fleet.nodes()
        self._places, self._exchange = places(setup, known)
        hosts = {node: known[node].host for node in self._nodes}
        if self._platform.emulates:  # containers have names that no taint can know
            hosts = dict.fromkeys(hosts, socket.gethostname())
        self.tainted = tainted_at(self._places, hosts, emulated=bool(self._platform.emulates))
        self._names = names_of(hosts, emulated=bool(self._platform.emulates))
        spares = strategy_for(setup.cell).spares_wanted
        if lacks := shortage(setup.cell, self.tainted, self._places, spares=spares):
            raise TooFewPlaces(lacks)
        needs = needs_of(setup.cell)
        host = self._platform.host
        self.store = None
        self._store: Any = None
        if session.zygote is not None and Need.STORE_PROCESS in needs:
            self.store = StoreKeeper(session.zygote.fork, host)
            self.store_port = self.store.port
        else:
            self._store, self.store_port = start_store(host)
        self.storage = mount_for(setup)
        machines, links = self.machines, self._platform.links
        limits = machines is not None and needs & {Need.MEMORY, Need.QUOTA}
        self.groups = GroupsByNode(machines, self._node_of) if machines and limits else None
        self._links = (
            LinksByNode(links, self._node_of) if links is not None and Need.LINKS in needs else None
        )
        self._proxy: LinkProxy | None = None
        if Need.LINKS in needs and links is None:
            self._proxy = LinkProxy(host)
        self.keepers = keepers_for(setup, lambda: self._node_keepers)

    # ---- nodes

    @property
    def links(self) -> LinkControl | None:
        """The platform's control, or else the link proxy."""
        return self._links if self._links is not None else self._proxy

    def places_on(self, node: int) -> Sequence[str]:
        """The devices that its agent reported."""
        return self._places[node]

    def usable(self) -> list[int]:
        """Nodes whose agents are connected and not silent: a start on a silent one would block. If
        there are none, all connected nodes; if there are none either, all nodes that may come back.
        """
        known = self._fleet.nodes()
        left = [node for node in self._nodes if not known[node].lost]
        there = [node for node in left if known[node].connected]
        return [node for node in there if known[node].silent_s < QUIET_S] or there or left

    def news(self) -> list[NodeNews]:
        found, self._news = self._news, []
        return found

    # ---- processes

    def identity(self) -> dict[str, Any]:
        """This process's pid, host and boot id, the time, and what the platform emulates."""
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "wall_ns": time.time_ns(),
            "boot": boot_id(),
            "emulates": self._platform.emulates,
        }

    def now_ns(self) -> int:
        """Monotonic nanoseconds of this machine."""
        return time.monotonic_ns()

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        """Make the node's agent start a rank; returns its pid there."""
        home = self._session.scratch(node)
        config = rank_config(
            self._setup,
            name=name,
            role=role,
            events=home / "events" / self._setup.id,
            logs=home / "logs" / self._setup.id,
            device=device,
            exchange=self._exchange,
            memory=in_memory(self._setup, self.keepers, node),
            net=NetworkAddresses(store_host=self._platform.host, address=self.address(node)),
            door=self._proxy.door if self._proxy is not None else None,
        )
        log = f"events/{self._setup.id}/{name}.jsonl"
        self._logs[name] = (node, log)
        return self.start(name, node, config.model_dump(mode="json"), mode=mode, log=log)

    def start(
        self, name: str, node: int, config: Mapping[str, Any], *, mode: str = "warm", log: str = ""
    ) -> int:
        """Start any process. Raises InfrastructureError; ConnectionError if its node is lost."""
        try:
            return self._fleet.spawn(name, node, config, mode=mode, log=log)
        except NodeGone as error:
            raise ConnectionError(error.message) from error

    def output(self, node: int, name: str) -> str:
        """The output file of a process on its node, which is forwarded to the run's logs."""
        return str(self._session.scratch(node) / "logs" / self._setup.id / f"{name}.log")

    def address(self, node: int) -> str:
        """The address that processes of a node listen at."""
        return self._fleet.nodes()[node].address

    def undo(self, name: str, pid: int) -> Undo | None:
        """No record: a node's processes end with its agent, and the platform has the record of the
        node.
        """
        return None

    def hardware(self) -> Sequence[Sign]:
        """What the agents' health services found."""
        found, self._signs = self._signs, []
        return found

    def checker(self) -> NodeChecks:
        """The agents check their nodes' places."""
        return self._checks

    def taint_name(self, node: int) -> str:
        """Its host's, or its number where other nodes share that."""
        return self._names[node][-1]

    def pid(self, name: str) -> int | None:
        """None: it runs on another machine, or in another container."""
        return None

    def wait(self, timeout_s: float) -> list[Report]:
        """Reports of ranks and spares; a process's last messages come before its exit."""
        if self.store is not None:
            self.store.look()
            self.store_port = self.store.port
        self.hear(0.0 if self._reports else timeout_s)
        reports, self._reports = self._reports, []
        return reports

    def hear(self, timeout_s: float) -> None:
        """Wait for reports of any node, and dispatch them."""
        self._sort(self._fleet.wait(timeout_s))
        self._session.renewal.look()

    def close(self) -> Leftovers:
        """End everything on all nodes and on this machine."""
        for node in self._nodes:
            self._tell(*node_events.clock_of(self._fleet.nodes()[node]))
        alive = self._fleet.begin("", None)
        self._gather(self._orphans)  # their last writes
        if self.storage is not None:
            self.storage.close()
        if self._proxy is not None:
            self._proxy.close()
        if self.store is not None:
            alive |= self.store.close()
        self._store = None
        memory = shared_memory.free(self._since_ns, time.time_ns())[1]
        ports = [self.store_port] if processes.listens(self.store_port, self._platform.host) else []
        left = [{"pid": pid, "process": name} for pid, name in alive.items()]
        self._session.rest()
        return Leftovers(processes=left, ports=ports, shared_memory=memory)

    def _node_of(self, process: str) -> int:
        """The node of a rank, or of a keeper, which the limits of its node apply to as well."""
        if self.keepers is not None and self.keepers.owns(process):
            return self.keepers.node_of(process)
        return self._logs[process][0]

    def _lose(self, node: int) -> None:
        """Collect what its ranks wrote and its agent had not forwarded: it is needed soon, as
        evidence.
        """
        self._session.renewal.lost(node)
        lost = {
            name: place
            for name, place in self._logs.items()
            if place[0] == node and name not in self._orphans
        }
        self._orphans |= lost
        if self._platform.gone(node):
            self._gather(lost)

    def _gather(self, lost: Mapping[str, tuple[int, str]]) -> None:
        for node, log in lost.values():
            try:
                gather(self._session.scratch(node) / log, self._setup.run.root / log)
            except OSError as error:
                self._tell(
                    node_events.not_kept(
                        str(log), 0, f"it could not be completed: {error.strerror}"
                    )
                )

    # ---- what the fleet says

    def _tell(self, *said: node_events.EventData) -> None:
        self._news += [NodeNews(kind=kind, data=data) for kind, data in said]

    def _sort(self, found: Sequence[FleetReport]) -> None:
        for report in found:
            self._checks.hear(report)
            match report:
                case NodeJoined() | NodeLost() | ClockMeasured() | NodeWarned() | NotKept():
                    if isinstance(report, NodeJoined):
                        self._session.renewal.back(report.node)
                    elif isinstance(report, NodeLost):
                        self._lose(report.node)
                    if said := node_events.event_of(report):
                        self._tell(said)
                case NodeFound(node=node, sign=sign):
                    name = devices.on_node(sign.device, node) if sign.device is not None else None
                    self._signs.append(sign.model_copy(update={"device": name}))
                case NodeChecked():
                    pass  # heard above
                case _ if self._node_keepers.owns(report.process):
                    self._node_keepers.reports.append(report)
                case _:
                    self._reports.append(report)


def places(setup: ArmSetup, known: Mapping[int, NodeInfo]) -> tuple[dict[int, list[str]], Exchange]:
    """Devices of each node, and the exchange between all processes: as the workload says, else NCCL
    if every process that the job starts with has its own GPU. On CPU a node has one emulated slot
    per process that it starts with.
    """
    place, workload = setup.cell.scenario.topology, setup.cell.scenario.workload
    spares = [place.node_of_spare(index) for index in range(strategy_for(setup.cell).spares_wanted)]
    found: dict[int, list[str]] = {}
    single = True
    for node in range(place.nodes):
        wanted = max(1, len(place.ranks_on(node)) + spares.count(node))
        there = [name for name in known[node].devices if name.startswith("cuda")]
        if workload.device == "cuda" and not there:
            raise InfrastructureError(
                f"node {node} ({known[node].host}) has no CUDA device that torch can see",
                hint="give every node a GPU, or use workload.device: cpu",
            )
        single = single and workload.device == "cuda" and len(there) >= wanted
        names = there if workload.device == "cuda" else devices.slots(wanted)
        found[node] = [devices.on_node(name, node) for name in names]
    if workload.device != "cuda":
        return found, Exchange("gloo")
    return found, exchange_of(workload.backend, own_gpus=single)
