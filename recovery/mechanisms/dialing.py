"""Has gloo reach its peers another way than straight: through a tunnel, or a proxy that can be made slow.

Gloo hands each rank's listening address to the others through the store; of two ranks, the one with the larger
address connects to the other. Each rank here listens at a loopback address of its own that grows with the rank, so
that of any two the higher rank connects, and what it finds in the store for a lower one may be changed: to an
address below all of them, which leaves the order as it is.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

Address = tuple[str, int]
Dial = Callable[[int, Address], Address]
"""Where to connect to reach a rank that listens at an address."""

_RANKS_LIMIT = 1 << 16


def by_rank(dial: Callable[[str, Address], Address] | None, members: Sequence[str]) -> Dial | None:
    """The way to ranks, given the way to the processes that hold them."""
    return None if dial is None else lambda rank, address: dial(members[rank], address)


def address_of(rank: int) -> str:
    """The loopback address that a rank listens at. Raises ValueError above 65535."""
    if not 0 <= rank < _RANKS_LIMIT:
        raise ValueError(f"no address for rank {rank}")
    return socket.inet_ntoa(struct.pack(">I", (127 << 24 | 1 << 16) + rank))


def redirected(blob: bytes, peer: int, dial: Callable[[Address], Address]) -> bytes:
    """What gloo publishes of ``peer``, with its socket address (family, port, IPv4 address) changed by ``dial``.

    Raises RuntimeError when there is not exactly one: gloo's format is not the one known here.
    """
    known = socket.inet_aton(address_of(peer))
    at = blob.find(known)
    if at < 4 or blob.find(known, at + 1) >= 0 or blob[at - 4 : at - 2] != struct.pack("=H", socket.AF_INET):
        raise RuntimeError(f"cannot find the address of rank {peer} in what gloo published")
    host, port = dial((address_of(peer), struct.unpack(">H", blob[at - 2 : at])[0]))
    return blob[: at - 2] + struct.pack(">H", port) + socket.inet_aton(host) + blob[at + 4 :]


class RedirectingStore(dist.Store):
    """A store client in which the addresses of lower ranks are those that ``dial`` says. ``ranks``: who meets there, in
    order."""

    def __init__(self, inner: dist.Store, rank: int, ranks: Sequence[int], dial: Dial) -> None:
        super().__init__()
        self._inner = inner
        self._rank = rank
        self._ranks = ranks
        self._dial = dial

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """As the inner store."""
        self._inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """As the inner store, but for addresses."""
        value = self._inner.get(key)
        last = key.rsplit("/", 1)[-1]
        if not last.isdigit() or int(last) >= self._ranks.index(self._rank):
            return value
        peer = self._ranks[int(last)]
        return redirected(value, peer, lambda address: self._dial(peer, address))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """As the inner store."""
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)
