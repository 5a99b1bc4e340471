"""A rank's connection to the key-value store, kept from one generation to the next.

Making one costs more than it seems, see ``recovery.transport.reverse_dns``.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from trainchaos.recovery.collectives.lost import GenerationLost, first_line
from trainchaos.recovery.transport.reverse_dns import nameless

PROBE_LIMIT_S = 0.2
ATTEMPT_S = 0.4
PAUSE_S = 0.02
_GROUP = re.compile(r"generation-(\d+)(?:-standby-(\w+-\d+)-(\d+))?\b")
_MAPPED = "::ffff:"  # IPv4 over a socket of IPv6, as torch makes them

Place = tuple[str, int]
"""Numeric address and port."""


class StoreLink:
    """At most one idle connection; its taker owns it until it is kept again. For the forming
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
        """Keep a connection that is idle now."""
        self._at, self._client, self.inode = at, client, inode


def connect(
    at: Place, timeout: timedelta, check: Callable[[], None], aborted: Callable[[], bool]
) -> dist.TCPStore:
    """Connect to the store. Raises GenerationLost when it does not answer within ``timeout``, or
    the generation is aborted, and what ``check`` raises.

    In short attempts, each longer than the last: nothing but its own timeout ends torch's wait for
    a store that is gone.
    """
    deadline_s, attempt_s = time.monotonic() + timeout.total_seconds(), ATTEMPT_S / 2
    while True:
        try:
            with socket.create_connection(at, timeout=ATTEMPT_S):
                attempt_s *= 2  # there is one; it may be slow
            limit = timedelta(seconds=attempt_s)
            client = nameless(partial(dist.TCPStore, *at, is_master=False, timeout=limit))
            client.set_timeout(timeout)
            return client
        except (OSError, RuntimeError) as error:
            if aborted() or time.monotonic() > deadline_s:
                raise GenerationLost(f"could not form the group: {first_line(error)}") from error
            check()
            time.sleep(PAUSE_S)


def forget_former(client: dist.Store, called: str) -> int:
    """Delete the keys by which ranks of earlier generations connected, and of the groups whose
    place this one takes among those that stand by (``StandbyBook``); returns how many. They are not
    needed again: a rank that is still on its way into one of these has orders to leave it. A store
    that is gone has forgotten them. ``called``: this group, in the store.
    """
    count = 0
    try:
        for key in client.list_keys() if hasattr(client, "list_keys") else ():
            if _precedes(key, called):
                count += client.delete_key(key)
    except RuntimeError:
        pass
    return count


def _precedes(key: str, called: str) -> bool:
    its, own = _GROUP.match(key), _GROUP.match(called)
    if its is None or own is None:
        return False
    if its[1] != own[1]:
        return int(its[1]) < int(own[1])
    return its[2] is not None and its[2] == own[2] and int(its[3]) < int(own[3])


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
