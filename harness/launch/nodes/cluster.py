"""Nodes with their own agents: the session keeps them from arm to arm, a cluster has the processes
of one arm on them (``harness.launch.launcher.Cluster``), and keepers of in-memory checkpoints.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch import devices
from trainchaos.harness.launch.launcher import (
    ArmSetup,
    Leftovers,
    LinkControl,
    Stopped,
)
from trainchaos.harness.launch.links.client import LinkProxy
from trainchaos.harness.launch.memory import in_memory, keepers_for
from trainchaos.harness.launch.nodes.by_process import GroupsByNode, LinksByNode
from trainchaos.harness.launch.nodes.platform import Platform, PlatformNeeds
from trainchaos.harness.launch.nodes.untainted import tainted_at
from trainchaos.harness.launch.places.seats import shortage
from trainchaos.harness.launch.rank_setup import rank_config, strategy_for
from trainchaos.harness.launch.recipe import recipe
from trainchaos.harness.launch.requirements import needs_of
from trainchaos.harness.launch.storage import mount_for
from trainchaos.harness.launch.stores import StoreKeeper
from trainchaos.harness.undo.base import Undo
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import RemoveTree
from trainchaos.recovery.checkpoint.memory.keeper import KeeperConfig
from trainchaos.recovery.health.taints import TooFewPlaces, names_of
from trainchaos.recovery.nodes.coordinator import node_events
from trainchaos.recovery.nodes.coordinator.fleet import Fleet
from trainchaos.recovery.nodes.coordinator.node_state import (
    FleetReport,
    NodeFound,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NotKept,
)
from trainchaos.recovery.nodes.coordinator.place_checks import NodeChecks
from trainchaos.recovery.nodes.coordinator.salvage import gather
from trainchaos.recovery.nodes.coordinator.software import refuse_other
from trainchaos.recovery.nodes.host import FleetHost
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.policy.jobconfig import Exchange, NetworkAddresses, exchange_of
from trainchaos.recovery.process.forkserver import ForkServer
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived, Report
from trainchaos.recovery.process.host import Report as ProcessReport
from trainchaos.recovery.process.local import rank_environment, start_store
from trainchaos.recovery.process.processes import become_subreaper

QUIET_S = 1.0
REFUSALS = "refused.log"
READY_LIMIT_S = 120.0  # for all agents to connect: each imports torch first

Make = Callable[[PlatformNeeds], Platform]
# The survivors first recover undisturbed: a restarted node imports torch and may share their
# machine.
AGAIN_AFTER_S = 5.0
MAX_LIVES = 100  # of one node in one run
AT_ONCE = 32
LOOK_S = 0.2
EVERY_S = 0.2
"""How long one turn waits: an arm that begins waits for no more than that."""
LIMIT_S = 60.0
"""For a turn to end, which takes so long only where this process gets no processor."""


class NodesCluster(FleetHost):
    """One arm on the nodes of ``session``, all of which are connected. Raises
    InfrastructureError.
    """

    simulated = False

    def __init__(self, session: NodesSession, setup: ArmSetup) -> None:
        fleet = session.fleet
        super().__init__(fleet)
        self._session = session
        self._setup = setup
        self._platform = session.platform
        self.machines = session.platform.machines
        self.away, self.back, self.pressures = fleet.away, fleet.back, fleet.pressures
        self._nodes = range(setup.cell.scenario.topology.nodes)
        self._node_keepers = NodeKeepers(self)
        self._logs: dict[str, tuple[int, str]] = {}  # process -> its node and its event log
        self._orphans: dict[str, tuple[int, str]] = {}  # processes whose node was lost
        self._since_ns = time.time_ns()
        self.fleet.begin(setup.id, setup.run.root.resolve())
        for report in (*session.meanwhile, *fleet.wait(0)):
            self.sort(report)
        session.meanwhile.clear()
        self._news = []
        for node in self._nodes:
            info = fleet.nodes()[node]
            self.tell(NodeJoined(node=node, info=info), *node_events.clock_of(info))
        known = self.fleet.nodes()
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
        known = self.fleet.nodes()
        left = [node for node in self._nodes if not known[node].lost]
        there = [node for node in left if known[node].connected]
        return [node for node in there if known[node].silent_s < QUIET_S] or there or left

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
        self.ask_for(name, node, config, mode=mode, log=log)
        return self.started(name, node)

    def output(self, node: int, name: str) -> str:
        """The output file of a process on its node, which is forwarded to the run's logs."""
        return str(self._session.scratch(node) / "logs" / self._setup.id / f"{name}.log")

    def address(self, node: int) -> str:
        """The address that processes of a node listen at."""
        return self.fleet.nodes()[node].address

    def undo(self, name: str, pid: int) -> Undo | None:
        """No record: a node's processes end with its agent, and the platform has the record of the
        node.
        """
        return None

    def checker(self) -> NodeChecks:
        """The agents check their nodes' places."""
        return self.checks

    def taint_name(self, node: int) -> str:
        """Its host's, or its number where other nodes share that."""
        return self._names[node][-1]

    def wait(self, timeout_s: float) -> list[Report]:
        """Reports of ranks and spares; a process's last messages come before its exit."""
        if self.store is not None:
            self.store.look()
            self.store_port = self.store.port
        return super().wait(timeout_s)

    def hear(self, timeout_s: float) -> None:
        """Wait for reports of any node, and sort them."""
        super().hear(timeout_s)
        self._session.renewal.look()

    def close(self) -> Leftovers:
        """End everything on all nodes and on this machine."""
        for node in self._nodes:
            self.tell(*node_events.clock_of(self.fleet.nodes()[node]))
        alive = self.fleet.begin("", None)
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
                why = f"it could not be completed: {error.strerror}"
                self.tell(NotKept(file=str(log), bytes=0, why=why))

    def sort(self, report: FleetReport) -> None:
        """Notice nodes that come and go, and keep reports of keepers for them."""
        match report:
            case NodeJoined():
                self._session.renewal.back(report.node)
            case NodeLost():
                self._lose(report.node)
            case NodeFound(node=node, sign=sign):
                name = devices.on_node(sign.device, node) if sign.device is not None else None
                report = NodeFound(node=node, sign=sign.model_copy(update={"device": name}))
            case MessageReceived() | Dying() | Exited() if self._node_keepers.owns(report.process):
                self._node_keepers.reports.append(report)
                return
        super().sort(report)


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


class NodeKeepers:
    """One keeper for each node, started by the node's agent like any other process. ``reports``:
    reports of keepers that the cluster received.
    """

    def __init__(self, cluster: NodesCluster) -> None:
        self._cluster = cluster
        self._names: set[str] = set()
        self.reports: list[ProcessReport] = []
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

    def wait(self, timeout_s: float) -> list[ProcessReport]:
        """Reports of keepers; other reports are left to the cluster."""
        if not self.reports:
            self._cluster.hear(timeout_s)
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> dict[int, str]:
        """Nothing to do: keepers end with the arm."""
        return {}


@contextmanager
def nodes_session(
    cells: Sequence[Cell],
    run: RunDirectory,
    make: Make,
    *,
    token: bytes | None = None,
    port: int = 0,
    ready_s: float = READY_LIMIT_S,
) -> Iterator[NodesSession]:
    """The session of a launcher for nodes. ``make``: makes its platform; ``token``: what its agents
    show, if they are not told by this process; ``port``: where they connect, 0 for any;
    ``ready_s``: how long to wait for all. Raises InfrastructureError.
    """
    needs = frozenset(need for cell in cells for need in needs_of(cell))
    ledger = Ledger(run.ledger)
    home = RemoveTree(path=free_home(run.root.resolve()), inside=run.root.resolve())
    record = ledger.will(home)
    most = max(cell.scenario.topology.nodes for cell in cells)
    wanted = PlatformNeeds(run=run, cells=cells, nodes=most, needs=needs, will=ledger.will)
    platform = make(wanted)
    try:
        session = NodesSession(platform, wanted, home.path, token=token, port=port, ready_s=ready_s)
        try:
            yield session
        finally:
            session.close()
    finally:
        platform.close()
        outcome = home.undo()
        (ledger.undone if outcome.ok else ledger.failed)(record, outcome.text)


def free_home(root: Path) -> Path:
    """A directory for a session's agents that no other session of the run uses: cells with
    different launchers have a session each.
    """
    names = (f"agents-{number}" if number > 1 else "agents" for number in itertools.count(1))
    return next(path for name in names if not (path := root / name).exists())


class NodesSession:
    """Implements ``harness.launch.launcher.Session``. ``home``: directory for the agents' files,
    shared by all nodes; ``token``, ``port``, ``ready_s``: see ``nodes_session``. Raises
    InfrastructureError.
    """

    def __init__(
        self,
        platform: Platform,
        wanted: PlatformNeeds,
        home: Path,
        *,
        token: bytes | None = None,
        port: int = 0,
        ready_s: float = READY_LIMIT_S,
    ) -> None:
        self.platform = platform
        self._recipe = recipe(wanted.cells)
        self._home = home
        token = token or secrets.token_bytes(32)
        self._ready_s = ready_s
        self._token_file = _write_token(home, token)
        self._refusals = wanted.run.root / REFUSALS
        self._played = False
        self.fleet = Fleet(token=token, host=platform.host, port=port, refused=self._note_refusal)
        self.zygote: ForkServer | None = None
        if Need.STORE_PROCESS in wanted.needs:  # a process of this machine keeps the store
            become_subreaper()
            self.zygote = ForkServer(self._recipe.entry, ("torch",), rank_environment())
        self.renewal = Renewal(platform, self._begin, nodes=wanted.nodes)
        for node in range(wanted.nodes):
            self.renewal.start(node)
        self.meanwhile: list[FleetReport] = []
        """What happened between two arms, for the next one."""
        self._tending = Tending(self.fleet.wait)
        self.rest()

    def rest(self) -> None:
        """No arm is played on these nodes now."""
        self._tending.begin()

    def cluster(self, setup: ArmSetup, stopped: Callable[[], bool] = lambda: False) -> NodesCluster:
        """Prepare for one arm: wait for every node of its cell, including nodes lost in an earlier
        arm.

        Raises InfrastructureError, which names the missing nodes and says why; Stopped.
        """
        for report in (happened := self._tending.end()):
            if isinstance(report, NodeLost):
                self.renewal.lost(report.node)
            elif isinstance(report, NodeJoined):
                self.renewal.back(report.node)
        self.meanwhile += happened
        if self.zygote is not None:
            self.zygote.await_ready()
        self._await_nodes(range(setup.cell.scenario.topology.nodes), stopped)
        return NodesCluster(self, setup)

    def scratch(self, node: int) -> Path:
        """Directory for the files of a node's agent, as the agent says, or as it will be told;
        forwarded files have the same relative path here as in the run's directory.
        """
        known = self.fleet.nodes().get(node)
        return Path(known.scratch) if known is not None and known.scratch else self._told(node)

    def _told(self, node: int) -> Path:
        """The directory that this process gives an agent which it starts."""
        return self._home / f"n{node}"

    def _note_refusal(self, why: str) -> None:
        with suppress(OSError), self._refusals.open("a") as stream:
            stream.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {why}\n")

    def close(self) -> None:
        """End the agents."""
        with suppress(InfrastructureError):  # they end anyway
            self._tending.end()
        self.renewal.close()
        self.fleet.close()
        if self.zygote is not None:
            self.zygote.close()

    def _begin(self, node: int) -> None:
        host, port = self.fleet.address
        like = self._recipe
        options = {
            "coordinator": f"{host}:{port}",
            "node": node,
            "address": self.platform.address(node),
            "token-file": self._token_file,
            "scratch": self._told(node),
            "boot": boot_id(),
            "entry": like.entry,
            "cold": like.cold,
        }
        command = [
            *(sys.executable, "-m", "trainchaos.recovery.nodes.serve"),
            *(f"--{name}={value}" for name, value in options.items()),
            *(f"--module={name}" for name in like.modules),
        ]
        self.platform.start(node, command, {"OMP_NUM_THREADS": "1"})

    def _resume(self, nodes: range) -> None:
        """Resume nodes that the previous arm left paused."""
        machines = self.platform.machines
        if machines is None or not machines.can_pause or not self._played:
            self._played = True
            return
        for node in nodes:
            with suppress(OSError):  # it is gone, and will be restarted
                if machines.seen(node).get("state") == "paused":
                    machines.resume(node)

    def _await_nodes(self, nodes: range, stopped: Callable[[], bool]) -> None:
        until_s = time.monotonic() + self._ready_s
        self._resume(nodes)
        self.renewal.look(at_once=True)
        for node in nodes:
            self.renewal.await_begun(
                node, limit_s=max(0.0, until_s - time.monotonic()), stopped=stopped
            )
        self.fleet.await_nodes(
            nodes,
            limit_s=max(0.0, until_s - time.monotonic()),
            gone=self.platform.gone,
            stopped=stopped,
        )
        if stopped():
            raise Stopped
        for node in nodes:
            self.renewal.back(node)
            refuse_other(self.fleet.nodes()[node])


def _write_token(home: Path, token: bytes) -> Path:
    """Write the secret that only the agents may read. Raises InfrastructureError."""
    path = home / "token"
    try:
        home.mkdir(mode=0o700)
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"{token.hex()}\n")
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {path}: {error.strerror}", hint="free disk space"
        ) from error
    return path


class Renewal:
    """Starts nodes, and restarts lost ones, on threads of their own: platforms may take long.

    ``begin`` makes the platform start a node; may raise InfrastructureError.
    """

    def __init__(self, platform: Platform, begin: Callable[[int], None], *, nodes: int) -> None:
        self._platform = platform
        self._begin = begin
        self._due_s: dict[int, float] = {}  # lost nodes, and when to restart them if they are gone
        self._lives: dict[int, int] = {}
        self._starting: dict[int, Future[None]] = {}
        self._starter = ThreadPoolExecutor(
            max_workers=min(nodes, AT_ONCE), thread_name_prefix="begin-node"
        )

    def start(self, node: int) -> None:
        """Start a node."""
        self._due_s.pop(node, None)
        self._lives[node] = self._lives.get(node, 0) + 1
        self._starting[node] = self._starter.submit(self._begin, node)

    def lost(self, node: int) -> None:
        """A node was lost; restart it soon if it is gone and the platform can replace it. It may
        also come back by itself.
        """
        self._due_s[node] = time.monotonic() + AGAIN_AFTER_S

    def back(self, node: int) -> None:
        """The node's agent is connected."""
        self._due_s.pop(node, None)

    def look(self, *, at_once: bool = False) -> None:
        """Start the nodes that are due; does not wait."""
        now_s = time.monotonic()
        for node, due_s in list(self._due_s.items()):
            idle = node not in self._starting or self._starting[node].done()
            may = idle and (at_once or due_s <= now_s) and self._lives[node] < MAX_LIVES
            if may and self._platform.gone(node) and self._platform.replaceable(node):
                self.start(node)

    def await_begun(
        self, node: int, *, limit_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for a pending start of a node, or until ``stopped``. Raises InfrastructureError."""
        future = self._starting.get(node)
        until_s = time.monotonic() + limit_s
        while future is not None and not stopped():
            try:
                future.result(timeout=max(0.0, min(LOOK_S, until_s - time.monotonic())))
                return
            except LateError as error:
                if time.monotonic() < until_s:
                    continue
                raise InfrastructureError(
                    f"node {node} did not begin within {limit_s:.0f} s",
                    hint="see what the platform says of it",
                ) from error

    def close(self) -> None:
        """Start no more nodes, and wait for pending starts."""
        self._starter.shutdown(wait=True, cancel_futures=True)


class Tending:
    """Keeps agents in contact while no arm of theirs is played: other cells may take longer than
    the lease after which an agent takes its coordinator for lost.

    ``turn``: waits up to so many seconds, and returns what happened. It is called on a thread of
    its own between ``begin`` and ``end``, and by nobody else meanwhile.
    """

    def __init__(self, turn: Callable[[float], Sequence[FleetReport]]) -> None:
        self._turn = turn
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._happened: list[FleetReport] = []
        self._error: Exception | None = None

    def begin(self) -> None:
        """From now on, until ``end``. Nothing where it has begun already."""
        if self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._run, name="tend-nodes", daemon=True)
            self._thread.start()

    def end(self) -> list[FleetReport]:
        """Stop, and return what happened since the last call, in order. Raises what a turn has
        raised, and InfrastructureError where a turn does not end.
        """
        if self._thread is not None:
            self._over.set()
            self._thread.join(LIMIT_S)
            if self._thread.is_alive():
                raise InfrastructureError(
                    f"the nodes' connections did not answer within {LIMIT_S:g} s",
                    hint="see what holds this machine up",
                )
            self._thread = None
        happened, self._happened = self._happened, []
        error, self._error = self._error, None
        if error is not None:
            raise error
        return happened

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._happened += self._turn(EVERY_S)
        except Exception as error:  # whoever plays the next arm raises it
            self._error = error
