"""A rank's connection to the key-value store, kept from one generation to the next.

Making one costs more than it seems, see ``recovery.transport.reverse_dns``.
"""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta

import torch.distributed as dist

PROBE_LIMIT_S = 0.2
_GENERATION = re.compile(r"generation-(\d+)\b")
_MAPPED = "::ffff:"  # IPv4 over a socket of IPv6, as torch makes them

Place = tuple[str, int]
"""Numeric address and port."""


class StoreLink:
    """At most one idle connection; whoever takes it owns it until it is kept again. For the forming
    thread.
    """

    def __init__(self) -> None:
        self._at: Place | None = None
        self._client: dist.TCPStore | None = None
        self.inode = ""  # of its socket, such as ``socket:[4711]``

    def take(self, at: Place) -> dist.TCPStore | None:
        """The idle connection to the store at a place, if there is one and the store answers."""
        client, self._client = self._client, None
        if client is not None and self._at == at:
            try:
                client.set_timeout(timedelta(seconds=PROBE_LIMIT_S))
                client.check(["?"])
                return client
            except RuntimeError:
                pass  # another store, or none, is there by now
        self.inode = ""
        return None

    def keep(self, at: Place, client: dist.TCPStore, inode: str) -> None:
        """Keep a connection that nobody uses now."""
        self._at, self._client, self.inode = at, client, inode


def forget_generations(client: dist.Store, before: int) -> int:
    """Delete from the store by which ranks of earlier generations met; how many keys. Nobody will
    look for them: a rank that is still on its way into one of them has been told to leave it. A
    store that is gone has forgotten them.
    """
    count = 0
    try:
        for key in client.list_keys() if hasattr(client, "list_keys") else ():
            found = _GENERATION.match(key)
            if found and int(found[1]) < before:
                count += client.delete_key(key)
    except RuntimeError:
        pass
    return count


def socket_to(at: Place) -> str:
    """The newest TCP socket of this process that is connected to a place, as in /proc;
    empty: none.
    """
    for fd in sorted((int(name) for name in os.listdir("/proc/self/fd")), reverse=True):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith("socket:") and _peer(fd) == at:
                return link
        except OSError:
            continue
    return ""


def _peer(fd: int) -> Place | None:
    """Raises OSError for a socket that is not connected."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        host, port = sock.getpeername()[:2]
        return str(host).removeprefix(_MAPPED), int(port)
