"""Ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from chaos.errors import ScenarioError
from chaos.fault import Need
from chaos.scenario import Cell
from harness import processes
from harness.cgroups import CgroupControl, lacks_cgroup
from harness.health import Reading, nvml_events
from harness.launcher import ArmSetup, Launcher, Leftovers, Report
from harness.ledger import Ledger
from harness.links.client import LinkProxy
from harness.memory import in_memory, keepers_for
from harness.needs import needs_of
from harness.rank_setup import places, rank_config
from harness.rundir import RunDirectory
from harness.storage import lacks_mount, mount_for
from harness.stores import StoreKeeper
from harness.undo import KillProcess, KillSession
from harness.undoing import Undo
from recovery.forkserver import ForkServer, start_cold
from recovery.local import Children, rank_environment, start_store
from recovery.marks import Mark
from recovery.wire import Message

HARDWARE_EVERY_S = 1.0
RANK_GIB = 0.15  # private memory of one rank of the smallest workload
WARM_MODULES = (
    "numpy.random", "torch", "torch._dynamo", "torch.distributed.checkpoint", "harness.rank_faults", "harness.training",
    "harness.workloads.gpt", "harness.workloads._transformer", "harness.workloads.mlp",
)  # fmt: skip


class Local(Launcher):
    """Processes on this machine, gloo over the loopback interface (or NCCL with a GPU for each rank).

    Warm processes are forked from one that has imported everything; cold ones start Python anew.
    """

    offers: ClassVar[frozenset[Need]] = frozenset(
        {Need.LINK_PROXY, Need.STORE_PROCESS, Need.COORDINATOR_PROCESS, Need.MOUNT, Need.NODES, Need.CGROUP}
    )

    def lacks(self, need: Need) -> str | None:
        """Privileges."""
        if need is Need.CGROUP:
            return lacks_cgroup()
        return lacks_mount() if need is Need.MOUNT else None

    def session(self, cells: Sequence[Cell], run: RunDirectory) -> AbstractContextManager[LocalSession]:
        """Become a child subreaper and start the zygote."""
        return _session()

    def check(self, cell: Cell) -> None:
        """More ranks than this machine's memory holds."""
        from harness.devices import memory_gib

        most, ranks = max(1, int(memory_gib() / RANK_GIB)), cell.scenario.workload.ranks
        if ranks > most:
            raise ScenarioError(
                f"workload.ranks {ranks}: this machine's memory holds about {most} ranks",
                hint=f"use ranks: {most} or fewer",
            )

    def missing(self, cell: Cell) -> str | None:
        """CUDA devices, cores or memory a cell asks for and this machine lacks."""
        from harness.devices import missing

        return missing(cell)


@contextlib.contextmanager
def _session() -> Iterator[LocalSession]:
    session = LocalSession()
    try:
        yield session
    finally:
        session.close()


class LocalSession:
    """One zygote for a whole run; it imports while the first arm is being prepared."""

    def __init__(self) -> None:
        processes.become_subreaper()
        self.zygote = ForkServer("harness.rank:start", WARM_MODULES, _environment())
        self._noted = False

    def cluster(self, setup: ArmSetup) -> LocalCluster:
        """Make ready for one arm. The first call waits for the zygote, so that no arm pays for its start."""
        if not self._noted:
            self._noted = True
            Ledger(setup.run.ledger).will(KillProcess.of(self.zygote.process.pid, "zygote"), process="zygote")
        self.zygote.await_ready()
        return LocalCluster(self, setup)

    def close(self) -> None:
        """End the zygote at once."""
        self.zygote.close()


class LocalCluster:
    """The processes of one arm; implements ``harness.launcher.Cluster``."""

    def __init__(self, session: LocalSession, setup: ArmSetup) -> None:
        self._session = session
        self._setup = setup
        self._children = Children()
        self.places = places(setup)[0]
        self._nvml = nvml_events() if self.places[0].startswith("cuda") else None
        self._hardware_due_s = 0.0
        self._sessions: list[KillSession] = []
        self._since_ns = time.time_ns()
        self.store = StoreKeeper(session.zygote.fork) if Need.STORE_PROCESS in needs_of(setup.cell) else None
        self._store: Any = None
        if self.store is None:
            self._store, self.store_port = start_store()
        else:
            self.store_port = self.store.port
        self.storage = mount_for(setup)
        self._pids: dict[str, int] = {}
        wanted = Need.CGROUP in needs_of(setup.cell)
        name = f"{setup.run.root.name}-{setup.id}-{os.getpid()}"
        self._group = name if wanted else None
        self.groups = CgroupControl(name, self._pids.__getitem__) if wanted else None
        self.links = LinkProxy() if Need.LINK_PROXY in needs_of(setup.cell) else None
        self.keepers = keepers_for(setup, session.zygote.fork)

    def identity(self) -> dict[str, Any]:
        """This process, this host, this moment."""
        return {"pid": os.getpid(), "host": socket.gethostname(), "wall_ns": time.time_ns()}

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        return time.monotonic_ns()

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        """Start a rank process; returns its pid."""
        config = rank_config(self._setup, name=name, role=role, device=device)
        if self.keepers is not None:
            config = config.model_copy(
                update={"job": {**config.job, "memory": in_memory(self._setup, self.keepers, node)}}
            )
        if self.links is not None:
            config = config.model_copy(update={"link_proxy": self.links.door})
        config = config.model_copy(update={"group": self._group})
        data = config.model_dump_json().encode()

        def start(fds: list[int]) -> int:
            if mode == "warm":
                return self._session.zygote.fork(data, fds)
            return start_cold("harness.rank", data, fds, _environment())

        pid = self._children.spawn(name, start, log=config.events / f"{name}.jsonl")
        self._pids[name] = pid
        return pid

    def undo(self, name: str, pid: int) -> Undo | None:
        """A rank leads a session of its own."""
        self._sessions.append(KillSession.of(pid, name))
        return self._sessions[-1]

    def hardware(self) -> Sequence[Reading]:
        """What NVML says, where there is a driver; asked at most once a second."""
        now = time.monotonic()
        if self._nvml is None or now < self._hardware_due_s:
            return ()
        self._hardware_due_s = now + HARDWARE_EVERY_S
        return self._nvml.read()

    def send(self, name: str, message: Message) -> bool:
        """Send a message."""
        return self._children.send(name, message)

    def signal(self, name: str, signum: int) -> None:
        """Signal through the pidfd."""
        self._children.signal(name, signum)

    def mark(self, name: str) -> Mark:
        """The progress mark."""
        return self._children.mark(name)

    def os_state(self, name: str) -> str:
        """From /proc."""
        return self._children.os_state(name)

    def wait(self, timeout_s: float) -> list[Report]:
        """Messages and exits; a process's last messages come before its exit."""
        if self.store is not None:
            self.store.look()
            self.store_port = self.store.port
        return self._children.wait(timeout_s)

    def close(self) -> Leftovers:
        """Kill and reap everything, close the store, free shared memory, and look for what is left."""
        alive = self._children.close()
        if self.storage is not None:
            self.storage.close()
        if self.links is not None:
            self.links.close()
        if self.keepers is not None:
            alive |= self.keepers.close()
        if self.store is not None:
            alive |= self.store.close()
        for session in self._sessions if alive else ():
            session.undo()  # what a rank has started and left behind
        left = [
            {"pid": p, "process": name} for p, name in alive.items() if processes.state(p) not in ("X", "Z")
        ]
        self._store = None
        memory = processes.free_shared_memory(self._since_ns, time.time_ns())[1]
        ports = [self.store_port] if processes.listens(self.store_port) else []
        return Leftovers(processes=left, ports=ports, shared_memory=memory)


def _environment() -> dict[str, str]:
    """Of rank processes: one thread each, whatever the user's shell says."""
    return {**rank_environment(), "OMP_NUM_THREADS": "1"}
