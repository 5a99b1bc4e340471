"""Shuts down TCP connections of this process from outside: threads that wait in one of them return
with an error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable


def socket_inodes() -> set[str]:
    """Every socket of this process, by what /proc calls it."""
    return {inode for _, inode in _sockets()}


def shut_down(wanted: Callable[[str], bool], *, listening: bool = False) -> int:
    """Shut down the TCP sockets that are ``wanted``; ``listening``: those that listen too. Returns
    how many.
    """
    count = 0
    for fd, inode in _sockets():
        if wanted(inode) and _shut_down_one(fd, inode, listening):
            count += 1
    return count


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


def _shut_down_one(fd: int, inode: str, listening: bool) -> bool:
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
            if not listening and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
