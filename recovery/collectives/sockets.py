"""Shuts down TCP connections of this process from outside: threads that wait in one of them return
with an error.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Container
from pathlib import Path

Address = tuple[str, int]
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp


def socket_inodes() -> set[str]:
    """Every socket of this process, by what /proc calls it."""
    return {inode for _, inode in _sockets()}


def connections(own: Container[Address], peers: Container[Address]) -> set[str]:
    """The TCP connections over IPv4 of this process that were accepted at one of its ``own``
    addresses, or lead to one of ``peers``, by what /proc calls them.
    """
    rows = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    known = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[3] != _LISTENS and (_address(row[1]) in own or _address(row[2]) in peers)
    }
    return known & socket_inodes()


def _address(text: str) -> Address:
    """As /proc/net/tcp has it: an IPv4 address as this machine reads its bytes, and a port."""
    host, port = text.split(":")
    return socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16)


def keep_alive(wanted: Container[str], *, idle_s: int = 60) -> None:
    """Have the kernel probe these connections, which may be idle for days: what lies between, such
    as a firewall, must not forget them, and a peer that is gone is noticed.
    """
    for fd, inode in _sockets():
        copy = _copy_of(fd, inode) if inode in wanted else None
        if copy is None:
            continue
        with copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)


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
    copy = _copy_of(fd, inode)
    if copy is None:
        return False
    with copy as sock:
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


def _copy_of(fd: int, inode: str) -> socket.socket | None:
    """The socket again, under another descriptor; None if it has been closed since it was listed,
    and the descriptor used anew, for a file even.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        if os.readlink(f"/proc/self/fd/{copy}") == inode:
            # a socket object may set what all descriptors share, after ``socket.setdefaulttimeout``
            blocks = os.get_blocking(copy)
            made = socket.socket(fileno=copy)
            os.set_blocking(copy, blocks)
            return made
    except OSError:
        pass
    os.close(copy)
    return None
