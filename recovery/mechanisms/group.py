"""A process group that can be left at any moment.

``ProcessGroupGloo.abort`` returns at once but does not unblock a pending collective; shutting down the group's own TCP
sockets does, within milliseconds. NCCL has a working abort. Each generation uses its own store client and key prefix, so
nothing of an earlier one can be read, and a rank stuck in rendezvous is unblocked the same way.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist


class GenerationLost(Exception):
    """This generation cannot go on: a peer is gone, the link broke, or the supervisor aborted it."""


class Group:
    """The default process group of one generation.

    ``form`` and ``leave`` are called by the training thread, ``abort`` by any other. ``timeout_s`` bounds each collective
    and the rendezvous; it is a last resort, since the supervisor aborts from outside long before.
    """

    def __init__(self, *, generation: int, rank: int, world: int, store_port: int, backend: str, timeout_s: float) -> None:
        self.generation = generation
        self.rank = rank
        self.world = world
        self._store_port = store_port
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._foreign = _socket_inodes()
        self._own: set[str] | None = None

    def form(self) -> None:
        """Meet the other members. Raises GenerationLost when that fails."""
        try:
            client = dist.TCPStore("127.0.0.1", self._store_port, is_master=False, timeout=self._timeout)
            dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"generation-{self.generation}", client),
                rank=self.rank,
                world_size=self.world,
                timeout=self._timeout,
            )
        except (RuntimeError, ValueError) as error:
            raise GenerationLost(f"could not form the group: {_first_line(error)}") from error
        self._own = _socket_inodes() - self._foreign

    def abort(self) -> int:
        """Break every connection of the group; blocked calls raise. Safe to repeat. Returns the sockets shut down."""
        if self._backend == "nccl" and dist.is_initialized():
            dist.distributed_c10d._get_default_group().abort()
        return _shut_down(lambda inode: inode in self._own if self._own is not None else inode not in self._foreign)

    def leave(self) -> None:
        """Destroy the group; a broken one too."""
        self.abort()
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except RuntimeError:
                # Destroying a group whose peers are gone may complain; it is gone all the same.
                pass


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


def _shut_down(wanted) -> int:  # type: ignore[no-untyped-def]
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
    with socket.socket(fileno=copy) as sock:
        try:
            # The descriptor may have been closed and used anew since it was listed.
            if os.readlink(f"/proc/self/fd/{copy}") != inode or sock.family not in (socket.AF_INET, socket.AF_INET6):
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


def all_reduce(tensor, *, async_op: bool = False):  # type: ignore[no-untyped-def]
    """Sum over the default group, in place. Raises GenerationLost."""
    try:
        return dist.all_reduce(tensor, async_op=async_op)
    except RuntimeError as error:
        raise GenerationLost(_first_line(error)) from error


def wait(work) -> None:  # type: ignore[no-untyped-def]
    """Wait for asynchronous work. Raises GenerationLost."""
    try:
        work.wait()
    except RuntimeError as error:
        raise GenerationLost(_first_line(error)) from error
