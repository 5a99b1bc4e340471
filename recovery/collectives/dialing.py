"""Makes gloo reach its peers by another way than directly: through a tunnel, or a proxy that can be
made slow.

Gloo passes each rank's listening address to the others through the store; of two ranks, the one
with the larger address connects to the other. The addresses that a rank finds in the store may be
changed: to an address below its own, which keeps the order. On one machine each rank listens at a
loopback address of its own; ranks of a node share the node's, and their ports decide.
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
_SIZE = struct.Struct("=Q")
_BLOB = 128 + 8  # a sockaddr_storage and a number


class RankNames:
    """The names of the processes that hold ranks, which each puts into the store before it is found
    there. ``rank``, ``name``: of this one.
    """

    def __init__(self, store: dist.Store, rank: int, name: str) -> None:
        self._store = store
        store.set(str(rank), name)

    def by_rank(self, dial: Callable[[str, Address], Address], ranks: Sequence[int]) -> Dial:
        """The way to those of ``ranks`` by their places, given the way to the processes that hold
        them.
        """
        return lambda place, address: dial(self._store.get(str(ranks[place])).decode(), address)


def address_of(rank: int) -> str:
    """The loopback address that a rank listens at. Raises ValueError above 65535."""
    if not 0 <= rank < _RANKS_LIMIT:
        raise ValueError(f"no address for rank {rank}")
    return socket.inet_ntoa(struct.pack(">I", (127 << 24 | 1 << 16) + rank))


def published(blob: bytes) -> Address:
    """The address in what gloo publishes of a rank: the length of its host's name, the name, the
    length of a socket address (family, port, IPv4 address, ...), the socket address, and more.

    Raises RuntimeError when it is not that: gloo's format is not the one known here, or the address
    is no IPv4 one.
    """
    at = _address_at(blob)
    return socket.inet_ntoa(blob[at + 4 : at + 8]), int(
        struct.unpack(">H", blob[at + 2 : at + 4])[0]
    )


def redirected(blob: bytes, address: Address) -> bytes:
    """What gloo publishes, with another address in it. Raises RuntimeError as ``published``."""
    at, (host, port) = _address_at(blob), address
    return blob[: at + 2] + struct.pack(">H", port) + socket.inet_aton(host) + blob[at + 8 :]


def connects(own: Address, peer: Address) -> bool:
    """Whether gloo has the rank at ``own`` connect to the one at ``peer``, and not the other way
    round.

    It compares addresses as they go over the wire, and ports of one address as this machine reads
    those bytes.
    """
    return _order(own) > _order(peer)


def _order(address: Address) -> tuple[bytes, int]:
    return socket.inet_aton(address[0]), socket.htons(address[1])


def _address_at(blob: bytes) -> int:
    name = int(_SIZE.unpack_from(blob)[0]) if len(blob) >= _SIZE.size else len(blob)
    at = _SIZE.size + name + _SIZE.size
    whole = len(blob) >= at + _BLOB and _SIZE.unpack_from(blob, at - _SIZE.size)[0] == _BLOB
    if not whole or blob[at : at + 2] != struct.pack("=H", socket.AF_INET):
        raise RuntimeError("cannot find an IPv4 address in what gloo published")
    return at


class _PassingStore(dist.Store):
    """A store client that asks another one. ``place``: of this rank among those that meet there;
    they are counted like that here.
    """

    def __init__(self, inner: dist.Store, place: int) -> None:
        super().__init__()
        self._inner = inner
        self._place = place

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)


class RedirectingStore(_PassingStore):
    """A store client in which the addresses of those that this rank connects to are what ``dial``
    says.
    """

    def __init__(self, inner: dist.Store, place: int, dial: Dial) -> None:
        super().__init__(inner, place)
        self._dial = dial
        self._own: Address | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if _rank_in(key) == self._place:
            self._own = published(value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """As the inner store, but for addresses. Raises RuntimeError when a way leads over too high
        an address.
        """
        value, peer = super().get(key), _rank_in(key)
        if peer is None or self._own is None or not connects(self._own, at := published(value)):
            return value
        way = self._dial(peer, at)
        if not connects(self._own, way):
            raise RuntimeError(
                f"gloo would not connect from {self._own[0]} to {way[0]}, which is not below it"
            )
        return redirected(value, way)


class NotingStore(_PassingStore):
    """A store client that notes which addresses gloo publishes and finds there: ``own``, and
    ``peers``. Raises RuntimeError as ``published``.
    """

    def __init__(self, inner: dist.Store, place: int) -> None:
        super().__init__(inner, place)
        self.own: set[Address] = set()
        self.peers: set[Address] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if _rank_in(key) == self._place:
            self.own.add(published(value))
        super().set(key, value)

    def get(self, key: str) -> bytes:
        value = super().get(key)
        if _rank_in(key) not in (None, self._place):
            self.peers.add(published(value))
        return value


def _rank_in(key: str) -> int | None:
    last = key.rsplit("/", 1)[-1]
    return int(last) if last.isdigit() else None
