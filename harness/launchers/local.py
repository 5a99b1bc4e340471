"""Ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.cgroups import CgroupControl, lacks_cgroup
from trainchaos.harness.launch.launcher import ArmSetup, Launcher, Leftovers
from trainchaos.harness.launch.links.client import LinkProxy
from trainchaos.harness.launch.memory import in_memory, keepers_for
from trainchaos.harness.launch.nodes.untainted import lacks_untainted, tainted_here
from trainchaos.harness.launch.rank_setup import places, rank_config
from trainchaos.harness.launch.recipe import recipe
from trainchaos.harness.launch.requirements import needs_of
from trainchaos.harness.launch.storage import lacks_mount, mount_for
from trainchaos.harness.launch.stores import StoreKeeper
from trainchaos.harness.undo.base import Undo
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import KillProcess, KillSession
from trainchaos.recovery.checkpoint.memory.keepers import LocalKeeperHost
from trainchaos.recovery.health.checks import PlaceChecks, check_command
from trainchaos.recovery.health.service import machine_service
from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.health.taints import names_of
from trainchaos.recovery.process.host import Report
from trainchaos.recovery.process.local import LocalHost, start_store

RANK_GIB = 0.15  # private memory of one rank of the smallest workload
IN_GROUPS = frozenset({Need.CGROUP, Need.MEMORY, Need.QUOTA})


class Local(Launcher):
    """Processes on this machine, gloo over the loopback interface (or NCCL with a GPU for each
    rank).

    Warm processes are forked from one that has imported everything; cold ones start Python anew.
    """

    offers: ClassVar[frozenset[Need]] = frozenset(
        {Need.LINKS, Need.STORE_PROCESS, Need.COORDINATOR_PROCESS, Need.MOUNT, Need.NODES}
        | IN_GROUPS
    )

    def lacks(self, need: Need) -> str | None:
        """Privileges."""
        if need in IN_GROUPS:
            return lacks_cgroup()
        return lacks_mount() if need is Need.MOUNT else None

    @contextlib.contextmanager
    def session(self, cells: Sequence[Cell], run: RunDirectory) -> Iterator[LocalSession]:
        """Become a child subreaper and start the zygote."""
        with contextlib.closing(LocalSession(cells)) as session:
            yield session

    def check(self, cell: Cell) -> None:
        """More ranks than this machine's memory holds."""
        from trainchaos.harness.launch.devices import memory_gib

        most, ranks = max(1, int(memory_gib() / RANK_GIB)), cell.scenario.workload.ranks
        if ranks > most:
            raise ScenarioError(
                f"workload.ranks {ranks}: this machine's memory holds about {most} ranks",
                hint=f"use ranks: {most} or fewer",
            )

    def missing(self, cell: Cell) -> str | None:
        """CUDA devices, cores or memory a cell asks for and this machine lacks."""
        from trainchaos.harness.launch.devices import missing

        return missing(cell) or lacks_untainted(cell)


class LocalSession:
    """One zygote for a whole run of ``cells``; it imports while the first arm is being prepared."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        processes.become_subreaper()
        self.recipe = recipe(cells)
        self.zygote = self.recipe.server()
        self._noted = False

    def cluster(self, setup: ArmSetup, stopped: Callable[[], bool] = lambda: False) -> LocalCluster:
        """Make ready for one arm. The first call waits for the zygote, so that no arm pays for its
        start.
        """
        if not self._noted:
            self._noted = True
            Ledger(setup.run.ledger).will(
                KillProcess.of(self.zygote.process.pid, "zygote"), process="zygote"
            )
        self.zygote.await_ready()
        return LocalCluster(self, setup)

    def close(self) -> None:
        """End the zygote at once."""
        self.zygote.close()


class LocalCluster(LocalHost):
    """The processes of one arm; implements ``harness.launch.launcher.Cluster``."""

    simulated = False
    machines = None  # nodes are only names here

    def __init__(self, session: LocalSession, setup: ArmSetup) -> None:
        self._setup = setup
        devices, self._exchange = places(setup)
        nodes = setup.cell.scenario.topology.nodes
        super().__init__(session.zygote, session.recipe, devices, nodes=nodes)
        self._health = machine_service(devices)
        self._health.start()
        self.tainted = tainted_here(dict.fromkeys(range(nodes), devices))
        self._kills: list[KillSession] = []
        self._since_ns = time.time_ns()
        self.store = (
            StoreKeeper(session.zygote.fork) if Need.STORE_PROCESS in needs_of(setup.cell) else None
        )
        self._store: Any = None
        if self.store is None:
            self._store, self.store_port = start_store()
        else:
            self.store_port = self.store.port
        self.storage = mount_for(setup)
        self.pids: dict[str, int] = {}
        wanted = bool(needs_of(setup.cell) & IN_GROUPS)
        name = f"{setup.run.root.name}-{setup.id}-{os.getpid()}"
        self._group = name if wanted else None
        self.groups = CgroupControl(name, self._pid_of) if wanted else None
        self.links = LinkProxy() if Need.LINKS in needs_of(setup.cell) else None
        self.keepers = keepers_for(
            setup, lambda: LocalKeeperHost(session.zygote.fork, log=setup.run.logs(setup.id))
        )

    def _pid_of(self, process: str) -> int:
        """A rank's, or that of who keeps checkpoints on a node, which its limits hold for too."""
        if self.keepers is not None and self.keepers.owns(process):
            return self.keepers.pid_of(process)
        return self.pids[process]

    def identity(self) -> dict[str, Any]:
        """This process, this host, this moment."""
        return {"pid": os.getpid(), "host": socket.gethostname(), "wall_ns": time.time_ns()}

    def away(self) -> None:
        """Nothing is on another machine."""

    def back(self) -> None:
        """Nothing is on another machine."""

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        """Start a rank process; returns its pid."""
        run, arm = self._setup.run, self._setup.id
        config = rank_config(
            self._setup,
            name=name,
            role=role,
            events=run.events(arm),
            logs=run.logs(arm),
            device=device,
            exchange=self._exchange,
            memory=in_memory(self._setup, self.keepers, node),
            group=self._group,
            door=self.links.door if self.links is not None else None,
        )
        data = config.model_dump_json().encode()
        pid = self.start(name, data, mode=mode, log=config.events / f"{name}.jsonl")
        self.pids[name] = pid
        return pid

    def undo(self, name: str, pid: int) -> Undo | None:
        """A rank leads a session of its own."""
        self._kills.append(KillSession.of(pid, name))
        return self._kills[-1]

    def checker(self) -> PlaceChecks:
        """One check at a time, whichever node is meant."""
        return PlaceChecks(check_command())

    def taint_name(self, node: int) -> str:
        """This host's, or the node's number where there are several."""
        host = socket.gethostname()
        return names_of(dict.fromkeys(self.usable(), host), emulated=True)[node][-1]

    def hardware(self) -> Sequence[Sign]:
        """What this machine's health service found, where there are GPUs."""
        return self._health.take()

    def wait(self, timeout_s: float) -> list[Report]:
        """Messages and exits; a process's last messages come before its exit."""
        if self.store is not None:
            self.store.look()
            self.store_port = self.store.port
        return super().wait(timeout_s)

    def close(self) -> Leftovers:  # type: ignore[override]
        """Kill and reap everything, close the store, free shared memory, and look for what
        is left.
        """
        self._health.close()
        alive = super().close()
        if self.storage is not None:
            self.storage.close()
        if self.links is not None:
            self.links.close()
        if self.keepers is not None:
            alive |= self.keepers.close()
        if self.store is not None:
            alive |= self.store.close()
        for session in self._kills if alive else ():
            session.undo()  # what a rank has started and left behind
        left = [
            {"pid": p, "process": name}
            for p, name in alive.items()
            if processes.state(p) not in ("X", "Z")
        ]
        self._store = None
        memory = shared_memory.free(self._since_ns, time.time_ns())[1]
        ports = [self.store_port] if processes.listens(self.store_port) else []
        return Leftovers(processes=left, ports=ports, shared_memory=memory)
