"""A process group that can be left at any moment.

``ProcessGroupGloo.abort`` returns at once but does not unblock a pending collective; shutting down the
group's own TCP sockets does, within milliseconds. NCCL has a working abort. Each generation uses its own
key prefix, so nothing of an earlier one can be read, and a rank stuck in rendezvous is unblocked the same way.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recovery.jobconfig import Net
from recovery.layout import Layout
from recovery.mechanisms.dialing import Address, RedirectingStore, Roll, address_of
from recovery.mechanisms.storelink import StoreLink, socket_to
from recovery.nameless import nameless

POLL = timedelta(milliseconds=20)
LAST_CHANCE_S = 0.02
STORE_ATTEMPT_S = 0.4
STORE_PAUSE_S = 0.02
END_S = 5.0
LEAVING = "leave-group"  # the threads that take groups down


class GenerationLost(Exception):
    """This generation cannot go on: a peer is gone, the link broke, or the supervisor aborted it."""


class Circle:
    """Some ranks of a generation, and what they do together. ``ranks``: their numbers in the generation, in order;
    ``rank``: this one's.

    Used by the training thread. A circle of one rank has nothing to exchange.
    """

    def __init__(self, group: Group, ranks: Sequence[int], made: Any) -> None:
        self.rank = group.rank
        self.backend = group.backend
        self.ranks: Sequence[int] = tuple(ranks)
        self._group = group
        self._made = made

    def start(self, operation: Callable[[Any], dist.Work]) -> dist.Work:
        """Begin an operation on torch's process group. Raises GenerationLost."""
        try:
            return operation(self._made)
        except RuntimeError as error:
            raise GenerationLost(_first_line(error)) from error

    def start_all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> dist.Work | None:
        """Begin to sum ``tensor`` over the ranks, in place; None: nothing to wait for. Raises GenerationLost."""
        if self._made is None or not tensor.numel():
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.start(lambda made: made.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy ``tensor`` from rank ``source`` to all. Raises GenerationLost."""
        if self._made is not None:
            options = dist.BroadcastOptions()
            options.rootRank = self.ranks.index(source)
            self.wait(self.start(lambda made: made.broadcast([tensor], options)))
            self._group.settle()

    def wait(self, work: dist.Work | None) -> None:
        """Wait for an operation. Raises GenerationLost when it fails or the generation is aborted."""
        if work is not None:
            self._group.wait(work)

    def close(self) -> None:
        """Let go of torch's process group."""
        self._made = None


class Group:
    """The process group of one generation, whose ranks meet in up to three circles: ``everyone``; ``shard``, the ranks
    that hold one copy of the model together with this one; ``holders``, those that hold the same part as this one.

    ``form``, ``leave`` and the collectives are called by the training thread, ``abort`` by any other.
    ``check`` raises GenerationLost once the generation is aborted. ``timeout_s`` bounds the rendezvous, and
    ``collective_timeout_s`` (None: the same) each collective, which lasts as long as its last member does something
    else; both are a last resort, since the supervisor aborts from outside long before. ``dial``: where to
    connect to reach a process, by its name, that listens at an address; None: there. ``name``: of this process.

    Every wait looks up at least each ``POLL``: gloo can lose the wake-up of a thread that waits for a
    connection just being shut down (seen in about 1 of 30 aborts), and its wait would then last the whole
    timeout. Such an operation is abandoned.
    """

    def __init__(
        self, *, generation: int, rank: int, world: int, store_port: int, backend: str, timeout_s: float,
        check: Callable[[], None], shards: int = 1, name: str = "",
        dial: Callable[[str, Address], Address] | None = None, link: StoreLink | None = None, net: Net = Net(),
        collective_timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        self.generation = generation
        self.rank = rank
        self.world = world
        self.layout = Layout(world=world, shards=shards)
        self.everyone: Circle
        self.shard: Circle
        self.holders: Circle
        self.abandoned = False
        self._aborted = False
        self._store_at = (net.store_host, store_port)
        self._address = net.address
        self.backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._patience = timedelta(seconds=collective_timeout_s or timeout_s)
        self._check = check
        self._dial = dial
        self._name = name
        self._roll: Roll | None = None
        self._link = link
        self._foreign = _socket_inodes() - self._linked()
        self._own: set[str] | None = None
        self._made: list[Any] = []
        self._circles: list[Circle] = []

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.world)

    def form(self) -> None:
        """Meet the other members. Raises GenerationLost when that fails.

        On a thread of its own, which is left to its timeouts when the generation is aborted: nothing ends torch's wait
        for a store that is gone, or gloo's for a peer that was lost before it connected.
        """
        made: Future[list[Circle]] = Future()
        if self.backend == "nccl":
            _settle(made, self._make)
        else:
            threading.Thread(target=_settle, args=(made, self._make), name="form-group", daemon=True).start()
        while not wait([made], timeout=POLL.total_seconds()).done:
            try:
                self._check()
            except GenerationLost:
                self.abort()
                wait([made], timeout=LAST_CHANCE_S)
                raise
        try:
            self._circles = made.result()
        except (RuntimeError, ValueError) as error:
            raise GenerationLost(f"could not form the group: {_first_line(error)}") from error
        self.everyone, self.shard, self.holders = self._circles
        if self.backend != "nccl":
            for each in self._made:
                each._set_default_timeout(self._patience)
        self._own = _socket_inodes() - self._foreign - self._linked()

    def _make(self) -> list[Circle]:
        """Everyone, this rank's replica, and the holders of its shard; two of the same ranks are one."""
        layout, client = self.layout, self._client()
        replica, shard = layout.replica_of(self.rank), layout.shard_of(self.rank)
        wanted = {
            "": range(self.world),
            f"/replica-{replica}": layout.replica(replica),
            f"/shard-{shard}": layout.holders(shard),
        }
        if self._dial is not None:
            names = dist.PrefixStore(f"generation-{self.generation}/names", client)
            self._roll = Roll(names, self.rank, self._name)
        circles: dict[tuple[int, ...], Circle] = {}
        for name, ranks in wanted.items():
            if tuple(ranks) in circles:
                continue
            made = None
            if len(ranks) > 1 or not name:
                store = dist.PrefixStore(f"generation-{self.generation}{name}", client)
                made = self._meet(store, ranks)
                self._made.append(made)
            circles[tuple(ranks)] = Circle(self, ranks, made)
        if self._link is not None and not self._aborted:
            self._link.keep(self._store_at, client, self._link.inode or socket_to(self._store_at))
        return [circles[tuple(ranks)] for ranks in wanted.values()]

    def _meet(self, store: dist.Store, ranks: Sequence[int]) -> Any:
        """Torch's process group of these ranks."""
        place, size = ranks.index(self.rank), len(ranks)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, place, size, options)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._threads = 2
        dial = self._dial
        options._devices = [gloo_device(self._address or (address_of(self.rank) if dial else ""))]
        if dial is not None and self._roll is not None:
            store = RedirectingStore(store, place, self._roll.by_rank(dial, ranks))
        return dist.ProcessGroupGloo(store, place, size, options)

    def _linked(self) -> set[str]:
        """The socket of the connection to the store, if it is to outlive the generation."""
        return {self._link.inode} if self._link else set()

    def _client(self) -> dist.TCPStore:
        """Connect to the store. Raises GenerationLost when it does not answer, or the generation is aborted.

        In short attempts, each longer than the last: nothing but its own timeout ends torch's wait for a store that
        is gone.
        """
        deadline_s, attempt_s = time.monotonic() + self._timeout.total_seconds(), STORE_ATTEMPT_S / 2
        kept = self._link.take(self._store_at) if self._link else None
        if kept is not None:
            kept.set_timeout(self._timeout)
            return kept
        while True:
            try:
                with socket.create_connection(self._store_at, timeout=STORE_ATTEMPT_S):
                    attempt_s *= 2  # there is one; it may be slow
                limit = timedelta(seconds=attempt_s)
                client = nameless(partial(dist.TCPStore, *self._store_at, is_master=False, timeout=limit))
                client.set_timeout(self._timeout)
                return client
            except (OSError, RuntimeError) as error:
                if self._aborted or time.monotonic() > deadline_s:
                    raise GenerationLost(f"could not form the group: {_first_line(error)}") from error
                self._check()
                time.sleep(STORE_PAUSE_S)

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin to sum ``tensor`` over all ranks, in place. Raises GenerationLost."""
        work = self.everyone.start_all_reduce(tensor)
        assert work is not None
        return work

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy ``tensor`` from rank ``source`` to all. Raises GenerationLost."""
        self.everyone.broadcast(tensor, source)

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation. Raises GenerationLost when it fails or the generation is aborted."""
        # NCCL only enqueues here, and a timed wait would abort the communicator by itself. Gloo's own timeout
        # ends the loop at the latest.
        while self.backend != "nccl" and not _settled(work):
            try:
                self._check()
            except GenerationLost:
                self._abandon(work)
                raise
        try:
            work.wait()
        except RuntimeError as error:
            raise GenerationLost(_first_line(error)) from error

    def settle(self) -> None:
        """Have what was received in place. Raises GenerationLost.

        NCCL only enqueues, and an aborted kernel ends with garbage and no error: a state copied like that must not be
        taken for whole.
        """
        if self.backend == "nccl":
            torch.cuda.current_stream().synchronize()
            self._check()

    def abort(self) -> int:
        """Break every connection of the group; blocked calls raise. Safe to repeat. Returns the sockets shut down."""
        self._aborted = True
        if self.backend == "nccl":
            for made in self._made:
                made.abort()
        return _shut_down(
            lambda inode: inode in self._own if self._own is not None else inode not in self._foreign
        )

    def leave(self) -> None:
        """Let go of the group; of a broken one too."""
        self.abort()
        if not self.abandoned:
            made, self._made = self._made, []
            for circle in self._circles:
                circle.close()
            # Gloo's threads look up every 10 ms whether they are to end: nothing that anybody should wait for.
            threading.Thread(target=made.clear, name=LEAVING, daemon=True).start()

    def _abandon(self, work: dist.Work) -> None:
        """Give an operation a last chance to notice that its connections are gone, then leave it to itself.

        The group is kept alive for ever: destroying it would join the thread that waits.
        """
        self.abort()
        deadline = time.monotonic() + LAST_CHANCE_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.abandoned = True
                _keep_for_ever(self._made, work)
                return
            time.sleep(0.001)


def gloo_device(address: str) -> Any:
    """Where gloo listens: at a numeric address, which it need not look up; "": on the loopback interface."""
    if address:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    return dist.ProcessGroupGloo.create_device(interface=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))


@atexit.register
def _await_leaving() -> None:
    """A thread that comes back from gloo and finds no interpreter any more aborts the process."""
    deadline_s = time.monotonic() + END_S
    for thread in threading.enumerate():
        if thread.name == LEAVING:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _settle(made: Future[Any], make: Callable[[], Any]) -> None:
    try:
        made.set_result(make())
    except Exception as error:
        made.set_exception(error)


def _settled(work: dist.Work) -> bool:
    """Whether the operation has ended, well or badly, after waiting up to POLL for it."""
    try:
        work.wait(POLL)
    except RuntimeError:
        # Failed, or the time was up; it may even have succeeded since then, so the error itself tells nothing.
        return bool(work.is_completed())
    return True


def _keep_for_ever(*objects: object) -> None:
    for kept in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _socket_inodes() -> set[str]:
    return {inode for _, inode in _sockets()}


def _sockets() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found.append((int(name), link))
    return found


def _shut_down(wanted: Callable[[str], bool]) -> int:
    count = 0
    for fd, inode in _sockets():
        if wanted(inode) and _shut_down_one(fd, inode):
            count += 1
    return count


def _shut_down_one(fd: int, inode: str) -> bool:
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    # The descriptor may have been closed and used anew since it was listed, for a file even.
    if os.readlink(f"/proc/self/fd/{copy}") != inode:
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as sock:
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            # Gloo terminates the process when its listening socket fails.
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
