"""Ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from chaos.errors import InfrastructureError, ScenarioError
from chaos.scenario import Cell
from harness import processes
from harness.launcher import ArmSetup, Exited, Launcher, Leftovers, Report, Said
from harness.rank import RankConfig
from harness.rank_setup import rank_config
from recovery import marks
from recovery.marks import Mark, MarkPage
from recovery.wire import Channel, Message, WireError

START_LIMIT_S = 120.0
REAP_LIMIT_S = 10.0
RANK_GIB = 0.15  # private memory of one rank of the smallest workload
SEND_LIMIT_S = 0.5


class Local(Launcher):
    """Processes on this machine, gloo over the loopback interface (or NCCL with a GPU for each rank).

    Warm processes are forked from one that has imported everything; cold ones start Python anew.
    """

    def session(self) -> AbstractContextManager[LocalSession]:
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
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "harness.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True, env=_environment(), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureError(
                f"cannot start Python: {error.strerror}", hint="free memory or processes"
            ) from error
        theirs.close()
        ours.settimeout(START_LIMIT_S)
        self._control = ours
        self._ready = False

    def cluster(self, setup: ArmSetup) -> LocalCluster:
        """Make ready for one arm. The first call waits for the zygote, so that no arm pays for its start."""
        self.await_zygote()
        return LocalCluster(self, setup)

    def await_zygote(self) -> None:
        """Wait until the zygote has imported everything. Raises InfrastructureError when it does not."""
        if not self._ready:
            try:
                self._ready = self._control.recv(16) == b"ready"
            except OSError:
                pass
            if not self._ready:
                raise InfrastructureError(
                    "the process that pre-imports torch did not start",
                    hint=f"try: {sys.executable} -c 'import torch, harness.training'",
                )

    def fork(self, config: RankConfig, fds: list[int]) -> int:
        """Have the zygote fork a rank; returns its pid, a child of this process."""
        self.await_zygote()
        try:
            socket.send_fds(self._control, [config.model_dump_json().encode()], fds)
            return int(self._control.recv(32))
        except (OSError, ValueError) as error:
            raise InfrastructureError(
                f"the zygote is gone: {error}", hint="see the messages above"
            ) from error

    def close(self) -> None:
        """End the zygote at once; it holds nothing."""
        self._control.close()
        self._zygote.kill()
        self._zygote.wait(timeout=REAP_LIMIT_S)


class _Child:
    def __init__(self, name: str, pid: int, device: str, channel: Channel, page: MarkPage) -> None:
        self.name = name
        self.pid = pid
        self.device = device
        self.pidfd = os.pidfd_open(pid)
        self.channel: Channel | None = channel
        self.page = page
        self.gone = False


class LocalCluster:
    """The processes of one arm; implements ``harness.launcher.Cluster``."""

    def __init__(self, session: LocalSession, setup: ArmSetup) -> None:
        self._session = session
        self._setup = setup
        self._children: dict[str, _Child] = {}
        self._poll = select.poll()
        self._by_fd: dict[int, tuple[_Child, bool]] = {}
        self._shm_before = processes.shared_memory_names()
        self._store, self.store_port = _start_store()

    def identity(self) -> dict[str, Any]:
        """This process, this host, this moment."""
        return {"pid": os.getpid(), "host": socket.gethostname(), "wall_ns": time.time_ns()}

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        return time.monotonic_ns()

    def spawn(self, name: str, role: str, mode: str) -> int:
        """Start a rank process; returns its pid."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        mark_fd = marks.create()
        taken = [child.device for child in self._children.values() if not child.gone]
        config = rank_config(self._setup, name=name, role=role, taken=taken)
        fds = [theirs.fileno(), mark_fd]
        try:
            pid = self._session.fork(config, fds) if mode == "warm" else _start_cold(config, fds)
            child = _Child(
                name, pid, config.device, Channel(ours, send_limit_s=SEND_LIMIT_S), MarkPage(mark_fd)
            )
        finally:
            theirs.close()
            os.close(mark_fd)
        self._children[name] = child
        for fd, is_exit in ((child.pidfd, True), (ours.fileno(), False)):
            self._by_fd[fd] = (child, is_exit)
            self._poll.register(fd, select.POLLIN)
        return pid

    def send(self, name: str, message: Message) -> bool:
        """Send a message."""
        child = self._children[name]
        return child.channel is not None and child.channel.send(message)

    def signal(self, name: str, signum: int) -> None:
        """Signal through the pidfd."""
        child = self._children[name]
        if not child.gone:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signum)

    def mark(self, name: str) -> Mark:
        """The progress mark."""
        return self._children[name].page.read()

    def os_state(self, name: str) -> str:
        """From /proc."""
        child = self._children[name]
        return "X" if child.gone else processes.state(child.pid)

    def wait(self, timeout_s: float) -> list[Report]:
        """Messages and exits; a process's last messages come before its exit."""
        reports: list[Report] = []
        ready = self._poll.poll(max(0.0, timeout_s) * 1000)
        for fd, _ in sorted(ready, key=lambda item: self._by_fd[item[0]][1]):
            child, is_exit = self._by_fd[fd]
            reports.extend(self._read(child))
            if is_exit:
                reports.append(self._reap(child))
        return reports

    def close(self) -> Leftovers:
        """Kill and reap everything, close the store, and look for what is left."""
        for child in self._children.values():
            self.signal(child.name, signal.SIGKILL)
        deadline = time.monotonic() + REAP_LIMIT_S
        while any(not c.gone for c in self._children.values()) and time.monotonic() < deadline:
            self.wait(0.1)
        sessions = {child.pid for child in self._children.values()}
        left = [{"pid": c.pid, "process": c.name} for c in self._children.values() if not c.gone]
        left += [{"pid": pid, "process": "?"} for pid in processes.in_sessions(sessions)]
        for child in self._children.values():
            child.page.close()
            if child.channel:
                child.channel.close()
            os.close(child.pidfd)
        self._store = None
        memory = sorted(processes.shared_memory_names() - self._shm_before)
        ports = [self.store_port] if processes.listens(self.store_port) else []
        return Leftovers(processes=left, ports=ports, shared_memory=memory)

    def _read(self, child: _Child) -> list[Report]:
        """All messages there are; a channel that ended is closed."""
        reports: list[Report] = []
        channel = child.channel
        while channel is not None:
            try:
                messages = channel.receive() if processes.readable(channel.fileno()) else []
            except WireError:
                # Not a message of ours: a rank that talks nonsense is not to be trusted with more.
                self.signal(child.name, signal.SIGKILL)
                messages = None
            if messages is None:
                self._forget(channel.fileno())
                channel.close()
                child.channel = None
            if not messages:
                break
            reports.extend(Said(process=child.name, message=message) for message in messages)
        return reports

    def _reap(self, child: _Child) -> Exited:
        result = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        child.gone = True
        self._forget(child.pidfd)
        killed = result is not None and result.si_code != os.CLD_EXITED
        status = result.si_status if result is not None else None
        return Exited(
            process=child.name, exit_code=None if killed else status, signal=status if killed else None,
            time_ns=time.monotonic_ns(),
        )  # fmt: skip

    def _forget(self, fd: int) -> None:
        if fd in self._by_fd:
            del self._by_fd[fd]
            self._poll.unregister(fd)


def _start_store() -> tuple[Any, int]:
    """A key-value store in this process, so that no rank is special. Raises InfrastructureError."""
    import torch.distributed as dist

    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise InfrastructureError(
            f"cannot open a port for the store: {error}", hint="free a port on 127.0.0.1"
        ) from error
    return store, store.port


def _environment() -> dict[str, str]:
    """Of rank processes: one thread each, and gloo on the loopback interface unless the user says otherwise."""
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}


def _start_cold(config: RankConfig, fds: list[int]) -> int:
    reader, writer = os.pipe()
    os.write(writer, config.model_dump_json().encode())
    os.close(writer)
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "harness.rank", *map(str, fds), str(reader)],
            pass_fds=[*fds, reader], start_new_session=True, env=_environment(), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise InfrastructureError(
            f"cannot start a rank: {error.strerror}", hint="free memory or processes"
        ) from error
    finally:
        os.close(reader)
    # Reaped through its pidfd; Popen must not wait for it a second time.
    child.returncode = 0
    return child.pid
