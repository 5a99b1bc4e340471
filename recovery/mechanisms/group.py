"""A process group that can be left at any moment.

``ProcessGroupGloo.abort`` returns at once but does not unblock a pending collective; shutting down the
group's own TCP sockets does, within milliseconds. NCCL has a working abort. Each generation uses its own
store client and key prefix, so nothing of an earlier one can be read, and a rank stuck in rendezvous is
unblocked the same way.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from recovery.mechanisms.dialing import Dial, RedirectingStore, address_of

POLL = timedelta(milliseconds=20)
LAST_CHANCE_S = 0.02
STORE_ATTEMPT_S = 0.4
STORE_PAUSE_S = 0.02


class GenerationLost(Exception):
    """This generation cannot go on: a peer is gone, the link broke, or the supervisor aborted it."""


class Group:
    """The process group of one generation.

    ``form``, ``leave`` and the collectives are called by the training thread, ``abort`` by any other.
    ``check`` raises GenerationLost once the generation is aborted. ``timeout_s`` bounds each collective and
    the rendezvous; it is a last resort, since the supervisor aborts from outside long before.

    Every wait looks up at least each ``POLL``: gloo can lose the wake-up of a thread that waits for a
    connection just being shut down (seen in about 1 of 30 aborts), and its wait would then last the whole
    timeout. Such an operation is abandoned.
    """

    def __init__(
        self, *, generation: int, rank: int, world: int, store_port: int, backend: str, timeout_s: float,
        check: Callable[[], None], dial: Dial | None = None,
    ) -> None:  # fmt: skip
        self.generation = generation
        self.rank = rank
        self.world = world
        self.abandoned = False
        self._aborted = False
        self._store_port = store_port
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._check = check
        self._dial = dial
        self._foreign = _socket_inodes()
        self._own: set[str] | None = None
        self._pg: Any = None

    def form(self) -> None:
        """Meet the other members. Raises GenerationLost when that fails.

        On a thread of its own, which is left to its timeouts when the generation is aborted: nothing ends torch's wait
        for a store that is gone, or gloo's for a peer that was lost before it connected.
        """
        made: Future[Any] = Future()
        if self._backend == "nccl":
            _settle(made, self._made)
        else:
            threading.Thread(target=_settle, args=(made, self._made), name="form-group", daemon=True).start()
        while not wait([made], timeout=POLL.total_seconds()).done:
            try:
                self._check()
            except GenerationLost:
                self.abort()
                wait([made], timeout=LAST_CHANCE_S)
                raise
        try:
            self._pg = made.result()
        except (RuntimeError, ValueError) as error:
            raise GenerationLost(f"could not form the group: {_first_line(error)}") from error
        self._own = _socket_inodes() - self._foreign

    def _made(self) -> Any:
        store = dist.PrefixStore(f"generation-{self.generation}", self._client())
        return _make_group(self._backend, store, self.rank, self.world, self._timeout, self._dial)

    def _client(self) -> dist.TCPStore:
        """Connect to the store. Raises GenerationLost when it does not answer, or the generation is aborted.

        In short attempts, each longer than the last: nothing but its own timeout ends torch's wait for a store that
        is gone.
        """
        deadline_s, attempt_s = time.monotonic() + self._timeout.total_seconds(), STORE_ATTEMPT_S / 2
        address = ("127.0.0.1", self._store_port)
        while True:
            try:
                with socket.create_connection(address, timeout=STORE_ATTEMPT_S):
                    attempt_s *= 2  # there is one; it may be slow
                client = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=attempt_s))
                client.set_timeout(self._timeout)
                return client
            except (OSError, RuntimeError) as error:
                if self._aborted or time.monotonic() > deadline_s:
                    raise GenerationLost(f"could not form the group: {_first_line(error)}") from error
                self._check()
                time.sleep(STORE_PAUSE_S)

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin to sum ``tensor`` over the ranks, in place. Raises GenerationLost."""
        try:
            return self._pg.allreduce([tensor])
        except RuntimeError as error:
            raise GenerationLost(_first_line(error)) from error

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy ``tensor`` from rank ``source`` to all. Raises GenerationLost."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        try:
            work = self._pg.broadcast([tensor], options)
        except RuntimeError as error:
            raise GenerationLost(_first_line(error)) from error
        self.wait(work)

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation. Raises GenerationLost when it fails or the generation is aborted."""
        # NCCL only enqueues here, and a timed wait would abort the communicator by itself. Gloo's own timeout
        # ends the loop at the latest.
        while self._backend != "nccl" and not _settled(work):
            try:
                self._check()
            except GenerationLost:
                self._abandon(work)
                raise
        try:
            work.wait()
        except RuntimeError as error:
            raise GenerationLost(_first_line(error)) from error

    def abort(self) -> int:
        """Break every connection of the group; blocked calls raise. Safe to repeat. Returns the sockets shut down."""
        self._aborted = True
        if self._backend == "nccl" and self._pg is not None:
            self._pg.abort()
        return _shut_down(
            lambda inode: inode in self._own if self._own is not None else inode not in self._foreign
        )

    def leave(self) -> None:
        """Let go of the group; of a broken one too."""
        self.abort()
        if not self.abandoned:
            self._pg = None

    def _abandon(self, work: dist.Work) -> None:
        """Give an operation a last chance to notice that its connections are gone, then leave it to itself.

        The group is kept alive for ever: destroying it would join the thread that waits.
        """
        self.abort()
        deadline = time.monotonic() + LAST_CHANCE_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.abandoned = True
                _keep_for_ever(self._pg, work)
                return
            time.sleep(0.001)


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


def _make_group(
    backend: str, store: dist.Store, rank: int, world: int, timeout: timedelta, dial: Dial | None
) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 2
    if dial is not None:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_of(rank))]
        return dist.ProcessGroupGloo(RedirectingStore(store, rank, dial), rank, world, options)
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    ]
    return dist.ProcessGroupGloo(store, rank, world, options)


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
