"""Processes of this machine under one supervisor: held by pidfd, each with a channel and a page of
progress marks.

A rank leads a session of its own. The kernel does not reuse the number of a session while it has
members, and may do so as soon as it has none; a late check must not take another program's session
for one of ours. So each session is checked soon after its leader has ended, and forgotten once it
is empty.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.forkserver import (
    MAX_REQUEST,
    ForkServer,
    LaunchRecipe,
    start_cold,
)
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived, NodeNews, Report
from trainchaos.recovery.process.stacks import StackReader
from trainchaos.recovery.process.starvation import Pulse, Starvation, Usage
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.event_ring import LineRing
from trainchaos.recovery.transport.exit_hint import Bell
from trainchaos.recovery.transport.progress_counters import Mark, MarkPage
from trainchaos.recovery.transport.reverse_dns import nameless
from trainchaos.recovery.transport.stream import MessageError
from trainchaos.recovery.transport.wire import Message

LOOK_LIMIT_S = 0.3
"""For a look at a process that is to be killed; it took 0.07 to 0.12 s on a loaded machine
(``recovery.process.outside_stacks``).
"""
LOOK_EVERY_S = 0.005
"""Between two questions whether it is still stopped."""


class ChildProcess:
    """``log``: its event log, completed when it dies; ``gone``: its exit is known; ``watch``: the
    thread that waits for its bell, once there is one.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        channel: Channel,
        page: MarkPage,
        *,
        ring: LineRing,
        bell: Bell,
        log: Path | None,
    ) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.channel: Channel | None = channel
        self.page = page
        self.ring = ring
        self.bell = bell
        self.log = log
        self.gone = False
        self.starvation = Starvation()
        self.stacks = StackReader(pid)
        self.watch: threading.Thread | None = None
        self._last_look: threading.Thread | None = None

    def signal(self, signum: int) -> None:
        """Signal it through the pidfd; one that has exited is no error, nor is one that would not
        answer ``STACK_SIGNAL``. SIGKILL comes a moment later to one that is stopped and being
        looked at.
        """
        if signum == signal.SIGKILL and self.stacks.looks:
            if self._last_look is None:
                self._last_look = kill_after(self.pidfd, lambda: self.stacks.looks)
        elif self.stacks.before(signum):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def let_go(self) -> None:
        """Release everything held for it. Its watch, if there is one, closes the bell when it
        ends.
        """
        self.stacks.close()
        self.page.close()
        self.ring.close()
        if self.watch is None:
            self.bell.close()
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        os.close(self.pidfd)


def kill_after(
    pidfd: int,
    looks: Callable[[], bool],
    *,
    now_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> threading.Thread:
    """Kill a process as soon as ``looks`` is not true any more, or LOOK_LIMIT_S is over, on a
    thread that is returned: it is read from outside meanwhile, and counts as dead already.
    ``pidfd``: of the process; a copy is held.
    """
    held = os.dup(pidfd)

    def kill() -> None:
        until_s = now_s() + LOOK_LIMIT_S
        while looks() and now_s() < until_s:
            pause(LOOK_EVERY_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(held, signal.SIGKILL)
        os.close(held)

    thread = threading.Thread(target=kill, name="last look", daemon=True)
    thread.start()
    return thread


LOOK_AFTER_S = 2.0  # a check reads all of /proc: not while the job recovers


class LeftoverSessions:
    """Sessions of leaders that were children of this process. ``ended``: those that may still have
    members.
    """

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}
        self._due_s = 0.0

    def add(self, leader: int) -> None:
        """Add a session whose leader has just been reaped."""
        if not self.ended:
            self._due_s = time.monotonic() + LOOK_AFTER_S
        self.ended[leader] = time.clock_gettime(time.CLOCK_BOOTTIME)

    def look(self) -> None:
        """Kill what is left, and reap what has become a child of ours; every LOOK_AFTER_S, and
        without waiting.
        """
        if not self.ended or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_AFTER_S
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        found: dict[int, list[tuple[int, list[str]]]] = {}
        for pid, fields in processes.everybody():
            if int(fields[3]) in self.ended:
                found.setdefault(int(fields[3]), []).append((pid, fields))
        for session, ended_s in list(self.ended.items()):
            members = found.get(session, [])
            # All members are younger than the leader's end: the session was empty, and this is
            # another one with the same number.
            if not any(int(fields[19]) * tick_s <= ended_s for _, fields in members):
                del self.ended[session]
                continue
            for pid, fields in members:
                _end(pid, session, zombie_of_ours=fields[:2] == ["Z", str(os.getpid())])


def _end(pid: int, session: int, *, zombie_of_ours: bool) -> None:
    with suppress(OSError):  # it has exited meanwhile
        fd = os.pidfd_open(pid)
        try:
            now = processes.stat_of(pid)  # read only once the descriptor pins the process
            if not now or int(now[3]) != session:
                return
            if zombie_of_ours:
                os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
            else:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


REAP_LIMIT_S = 10.0
SEND_LIMIT_S = 0.5
KEPT_MARKS = 1024  # how many exited processes keep their last mark, the newest
NOTHING = (progress_counters.NEVER, None)
BACKLOG = 1024
NCCL_WATCHDOG = {
    # a failed collective must neither end a process nor abort a communicator
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # else the host would wait in torch, where no order of the supervisor reaches it
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # its signal stays in the store: a later generation would take it for its own
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor may a stalled watchdog end the process
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the training thread handles CUDA errors itself
    # else it sleeps four times that, holding what enqueuing needs
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Settings of torch's ProcessGroupNCCL in a rank, see ``recovery.collectives.nccl``."""
RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many collectives torch's flight recorder keeps; the first that is set counts, the second is
its older name (torch 2.11 to 2.13, FlightRecorder.hpp).
"""
RAS_ADDRESS = "NCCL_RAS_ADDR"
"""Where the processes of a job on a machine answer as NCCL's RAS; NCCL's own default is one port
for all jobs.
"""
RECORDER = "256"  # unless the user says how many; torch's own default is 2000


class Children:
    """Starts processes, exchanges messages with them, signals and reaps them; all by descriptors,
    so that no other process is hit.

    The calling process must be a child subreaper (``recovery.process.processes.become_subreaper``).
    ``named``: the memory that a process shares with this one is a file beside its event log while
    it lives (``recovery.nodes.coordinator.salvage``).

    Of a process that has exited its last progress mark and its stacks are kept, and only for the
    newest KEPT_MARKS. An unknown name is that of a process that exited long ago.
    """

    def __init__(self, *, named: bool = False) -> None:
        self._named = named
        self._children: dict[str, ChildProcess] = {}  # living processes
        # of exited processes, the oldest first: mark, and stacks of those that were asked
        self._last: dict[str, tuple[Mark, str | None]] = {}
        self._sessions = LeftoverSessions()
        self._usage = Usage()
        self._watches: list[threading.Thread] = []
        self._poll = select.epoll()
        self._by_fd: dict[int, tuple[ChildProcess, bool]] = {}
        self._rang: queue.SimpleQueue[ChildProcess] = queue.SimpleQueue()
        self._rang_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._rang_fd, select.EPOLLIN)

    def begin(
        self, name: str, start: Callable[[list[int]], int], *, log: Path | None = None
    ) -> int:
        """Start a process; returns its pid. ``start`` gets its control and mark descriptor and
        returns the pid; ``log``: its event log, completed when it dies.
        """
        mark_fd = progress_counters.create(
            memory_beside(log) if self._named and log is not None else None
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pid = 0
        try:
            pid = start([theirs.fileno(), mark_fd])
            channel = Channel(ours, send_limit_s=SEND_LIMIT_S)
            child = ChildProcess(
                name,
                pid,
                channel,
                MarkPage(mark_fd),
                ring=progress_counters.ring_of(mark_fd),
                bell=progress_counters.bell_of(mark_fd),
                log=log,
            )
        except BaseException:
            ours.close()
            # a child of ours that was not waited for, so that its pid is not reused
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        finally:
            theirs.close()
            os.close(mark_fd)
        self._children[name] = child
        for fd, is_exit in ((child.pidfd, True), (ours.fileno(), False)):
            self._by_fd[fd] = (child, is_exit)
            self._poll.register(fd, select.EPOLLIN)
        return pid

    def fileno(self) -> int:
        """Readable when ``wait`` would return something at once."""
        return self._poll.fileno()

    def alive(self, name: str) -> bool:
        """Whether its exit has not been reported yet."""
        return name in self._children

    def send(self, name: str, message: Message) -> bool:
        """Send a message; False when it has exited or no longer reads."""
        channel = child.channel if (child := self._children.get(name)) is not None else None
        return channel is not None and channel.send(message)

    def signal(self, name: str, signum: int) -> None:
        """Signal through the pidfd; a process that has exited is no error, nor is one that would
        not answer ``STACK_SIGNAL``.
        """
        child = self._children.get(name)
        if child is not None:
            child.signal(signum)

    def mark(self, name: str) -> Mark:
        """The progress mark; readable after the process's death too."""
        child = self._children.get(name)
        return child.page.read() if child is not None else self._last.get(name, NOTHING)[0]

    def os_state(self, name: str) -> str:
        """The process state as the kernel reports it, X when it has exited."""
        child = self._children.get(name)
        return processes.state(child.pid) if child is not None else "X"

    def stacks(self, name: str) -> str | None:
        """What it wrote since it was sent ``STACK_SIGNAL``, or was seen of it; None: nothing can be
        read. Readable after the process's death too.
        """
        child = self._children.get(name)
        return child.stacks.read() if child is not None else self._last.get(name, NOTHING)[1]

    def pulse(self, name: str) -> Pulse:
        """How much CPU time it got; measured from the first call on."""
        child = self._children.get(name)
        return (
            child.starvation.taken(time.monotonic(), child.pid, self._usage)
            if child is not None
            else Pulse()
        )

    def wait(self, timeout_s: float) -> list[Report]:
        """Messages and exits, waiting up to ``timeout_s`` for one; a process's last messages come
        before its exit.
        """
        reports: list[Report] = []
        ready = [fd for fd, _ in self._poll.poll(max(0.0, timeout_s))]
        if self._rang_fd in ready:
            ready.remove(self._rang_fd)
            reports.extend(self._read_rang())
        for fd in sorted(ready, key=lambda fd: self._by_fd[fd][1] if fd in self._by_fd else False):
            if fd not in self._by_fd:
                continue  # its channel ended when the bell rang
            child, is_exit = self._by_fd[fd]
            reports.extend(self._read(child))
            if is_exit:
                reports.append(self._reap(child))
        self._sessions.look()
        return reports

    def close(self) -> dict[int, str]:
        """Kill and reap everything, also what these processes started; returns what could not be
        removed.

        That is: pid -> name, ``?`` for a process that one of ours started.
        """
        for name in self._children:
            self.signal(name, signal.SIGKILL)
        deadline = time.monotonic() + REAP_LIMIT_S
        while self._children and time.monotonic() < deadline:
            self.wait(0.1)
        left = dict.fromkeys(processes.end_sessions({*self._sessions.ended, *self._pids()}), "?")
        left |= {child.pid: child.name for child in self._children.values()}
        for child in self._children.values():
            child.gone = True  # its watch ends
            child.let_go()
        for watch in self._watches:
            watch.join(timeout=REAP_LIMIT_S)
        os.close(self._rang_fd)
        self._poll.close()
        return left

    def _pids(self) -> list[int]:
        return [child.pid for child in self._children.values()]

    def _read_rang(self) -> list[Report]:
        os.eventfd_read(self._rang_fd)
        reports: list[Report] = []
        while not self._rang.empty():
            child = self._rang.get_nowait()
            if not child.gone and processes.is_exiting(child.pid):
                # for threads that might outlive the main one
                self.signal(child.name, signal.SIGKILL)
                reports.extend([*self._read(child), Dying(process=child.name)])
        return reports

    def _listen(self, child: ChildProcess) -> None:
        try:
            if child.bell.wait(lambda: child.gone):
                self._rang.put(child)
                os.eventfd_write(self._rang_fd, 1)
        finally:
            child.bell.close()

    def _read(self, child: ChildProcess) -> list[Report]:
        """Read all pending messages; a channel that ended is closed."""
        reports: list[Report] = []
        channel = child.channel
        while channel is not None:
            try:
                messages = channel.receive() if processes.readable(channel.fileno()) else []
            except MessageError:
                # Not a message of ours: a rank that sends garbage is not trusted any further.
                self.signal(child.name, signal.SIGKILL)
                messages = None
            if messages is None:
                self._forget(channel.fileno())
                channel.close()
                child.channel = None
            if not messages:
                break
            reports.extend(
                MessageReceived(process=child.name, message=message) for message in messages
            )
        if child.watch is None and child.bell.held:
            child.watch = threading.Thread(
                target=self._listen, args=(child,), name="bell", daemon=True
            )
            child.watch.start()
            self._watches = [*(watch for watch in self._watches if watch.is_alive()), child.watch]
        return reports

    def _reap(self, child: ChildProcess) -> Exited:
        result = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        child.gone = True
        self._forget(child.pidfd)
        if child.channel is not None:  # a process that it started holds the other end
            self._forget(child.channel.fileno())
        if child.log is not None:
            # a full disk: its mark says how many lines there were
            with contextlib.suppress(OSError):
                child.ring.salvage(child.log)
        if child.log is not None and self._named:
            with contextlib.suppress(OSError):
                memory_beside(child.log).unlink()
        self._last[child.name] = child.page.read(), child.stacks.read()
        while len(self._last) > KEPT_MARKS:
            del self._last[next(iter(self._last))]
        child.let_go()
        del self._children[child.name]
        self._sessions.add(child.pid)
        killed = result is not None and result.si_code != os.CLD_EXITED
        status = result.si_status if result is not None else None
        return Exited(
            process=child.name,
            exit_code=None if killed else status,
            signal=status if killed else None,
            time_ns=time.monotonic_ns(),
        )

    def _forget(self, fd: int) -> None:
        if fd in self._by_fd:
            del self._by_fd[fd]
            self._poll.unregister(fd)


class LocalHost(Children):
    """Processes of one machine, started by ``server`` or as ``recipe`` says; ``server`` outlives
    this. In the supervisor's own process it is most of a ``recovery.process.host.Host``: who needs
    one adds ``spawn``. ``devices``: of this machine; ``nodes``: names that all mean it.
    """

    store_host = LOOPBACK

    def __init__(
        self,
        server: ForkServer,
        recipe: LaunchRecipe,
        devices: Sequence[str] = (),
        *,
        nodes: int = 1,
        named: bool = False,
    ) -> None:
        super().__init__(named=named)
        self._server, self._recipe = server, recipe
        self._devices, self._nodes = devices, range(nodes)

    def start(
        self,
        name: str,
        config: bytes,
        *,
        mode: str,
        log: Path | None = None,
        waiting: Callable[[], None] | None = None,
    ) -> int:
        """Start a process, warm or cold, and return its pid. ``config``: for its entry; ``log``:
        its event log; ``waiting``: called repeatedly until the process exists.

        Raises InfrastructureError.
        """
        if len(config) > MAX_REQUEST:
            raise InfrastructureError(
                f"the configuration of {name} has {len(config)} bytes, over {MAX_REQUEST}",
                hint="pass large parameters by a file",
            )

        def begin(fds: list[int]) -> int:
            if mode == "warm":
                return self._server.fork(config, fds, waiting)
            return start_cold(self._recipe.cold, config, fds, self._recipe.environment)

        return self.begin(name, begin, log=log)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def usable(self) -> Collection[int]:
        return self._nodes

    def places_on(self, node: int) -> Sequence[str]:
        return self._devices

    def pid(self, name: str) -> int | None:
        return child.pid if (child := self._children.get(name)) is not None else None

    def news(self) -> Sequence[NodeNews]:
        return ()


def script_recipe() -> LaunchRecipe:
    """The recipe of ranks that run a user's script (``recovery.rank.script``)."""
    modules = (
        "numpy.random",
        "torch",
        "torch._dynamo",
        "torch.utils.data",
        "torch.distributed.checkpoint",
        "trainchaos.recovery.rank.job",
        "trainchaos.recovery.state.warmth",
    )
    return LaunchRecipe(
        entry="trainchaos.recovery.rank.script:start",
        cold="trainchaos.recovery.rank.script",
        modules=modules,
        environment=rank_environment(),
    )


def memory_beside(log: Path) -> Path:
    """The file that a process with this event log shares with its supervisor, if the shared memory
    has a name.
    """
    return log.with_suffix(".memory")


def prepare_store() -> None:
    """Import what a store needs, which takes seconds."""
    import torch.distributed  # noqa: F401


def start_store(host: str = LOOPBACK) -> tuple[Any, int]:
    """Start a key-value store in this process, so that no rank is special; returns it and its port.
    Raises InfrastructureError.

    It listens at one address only, on a socket of ours: torch's own socket covers all addresses and
    IPv6, where clients appear as ``::ffff:127.0.0.1``, and torch would look up the name of each of
    them by DNS, and wait for the answer.
    """
    import torch.distributed as dist

    try:
        with socket.create_server((host, 0), backlog=BACKLOG) as listener:
            port = listener.getsockname()[1]
            fd = listener.detach()
            store = nameless(
                lambda: dist.TCPStore(
                    host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd
                )
            )
    except (RuntimeError, OSError) as error:
        raise InfrastructureError(
            f"cannot open a port for the store: {error}", hint=f"free a port on {host}"
        ) from error
    return store, store.port


def ask_store(port: int, *, timeout_s: float, host: str = LOOPBACK) -> float | None:
    """Seconds that one request to a store takes, not counting the connection; None: no answer."""
    import torch.distributed as dist

    try:
        limit = timedelta(seconds=timeout_s)
        client = nameless(
            lambda: dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=limit
            )
        )
        client.set("uninvolved-client", "?")
        started_s = time.monotonic()
        client.get("uninvolved-client")
        return round(time.monotonic() - started_s, 6)
    except RuntimeError:
        return None


def ras_address() -> str:
    """Where the ranks that this process starts answer as NCCL's RAS (``host:port``), as the user
    says, else at a port of their own; empty where there is no port.
    """
    return os.environ.get(RAS_ADDRESS) or _held_address()


@functools.cache
def _held_address() -> str:
    """A port of the loopback interface that no other program gets while this process lives: it is
    bound here, without being listened to, and NCCL's processes share it (SO_REUSEPORT).
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((LOOPBACK, 0))
        port = held.getsockname()[1]
    except OSError:
        held.close()
        return ""
    held.detach()  # open until this process ends
    return f"{LOOPBACK}:{port}"


def rank_environment() -> Mapping[str, str]:
    """Environment of rank processes: one thread each, and gloo on the loopback interface, unless
    the user sets something else; NCCL's RAS at an address of their own. Torch's watchdog of NCCL
    never ends them, whatever the user sets: that decision is their supervisor's.
    """
    ours = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if not any(name in os.environ for name in RECORDER_SIZES):
        ours[RECORDER_SIZES[0]] = RECORDER
    if address := ras_address():
        ours[RAS_ADDRESS] = address
    return {**ours, **os.environ, **NCCL_WATCHDOG}
