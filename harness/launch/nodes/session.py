"""The nodes of one run, kept from arm to arm: a platform and the fleet of its nodes' agents."""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup, Stopped
from trainchaos.harness.launch.nodes.cluster import NodesCluster
from trainchaos.harness.launch.nodes.platform import Platform, PlatformNeeds
from trainchaos.harness.launch.recipe import recipe
from trainchaos.harness.launch.requirements import needs_of
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import RemoveTree
from trainchaos.recovery.nodes.coordinator.fleet import Fleet
from trainchaos.recovery.nodes.coordinator.node_state import FleetReport, NodeJoined, NodeLost
from trainchaos.recovery.nodes.coordinator.software import refuse_other
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.process.forkserver import ForkServer
from trainchaos.recovery.process.local import rank_environment
from trainchaos.recovery.process.processes import become_subreaper

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
