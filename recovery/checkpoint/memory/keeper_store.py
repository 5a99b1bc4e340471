"""What one keeper holds: parts of checkpoints in memory files, within a limit. No sockets here.

A checkpoint is *complete* when every shard of it is held by some keeper, and *safe* when every
shard is held twice. The newest ``keep`` complete ones stay, and whatever is newer. When there is no
room, older ones are released as far as the newest safe one (the newest complete one where no second
keeper exists); beyond that the new part is refused, and everything stays as it is.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainchaos.recovery.checkpoint.memory.header import Header, Key, complete
from trainchaos.recovery.checkpoint.memory.protocol import Refusal
from trainchaos.recovery.policy.doubts import Doubt, in_doubt, together

# processes that may still ask for their buffers: twice as many as a keeper serves at once
MOST_SEATS = 1024


@dataclass(kw_only=True)
class HeldPart:
    """A part that is held. ``copy``: of another node's part; ``size``: of the file, bytes;
    ``readers``: transfers that read it now.
    """

    header: Header
    fd: int
    size: int
    copy: bool
    readers: int = 0
    dropped: bool = False


class KeeperStore:
    """Thread-safe. ``limit_bytes``: of all files together; ``doubles``: there are keepers to hold
    second copies.
    """

    def __init__(self, *, job: str, limit_bytes: int, keep: int, doubles: bool) -> None:
        self._doubles = doubles
        self._job = job
        self._limit_bytes = limit_bytes
        self._keep = keep
        self._entries: dict[Key, HeldPart] = {}
        self._others: dict[int, tuple[Key, ...]] = {}
        self._doubts: tuple[Doubt, ...] = ()
        self._released: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, header: Header, fd: int, *, copy: bool) -> None:
        """Take a part, whose file the store closes from now on, at once where it refuses it. Raises
        Refusal.
        """
        size = os.fstat(fd).st_size
        with self._lock:
            try:
                self._check(header, fd, size)
                for entry in self._spare_for(header.key, size):
                    self._drop(self._entries.pop(entry.header.key))
            except Refusal:
                os.close(fd)
                raise
            old = self._entries.pop(header.key, None)
            self._entries[header.key] = HeldPart(header=header, fd=fd, size=size, copy=copy)
            if old is not None:
                self._drop(old)
            self._retain()

    def would_take(self, header: Header) -> None:
        """Raise Refusal if ``add`` would, as far as is known before the data arrive."""
        with self._lock:
            self._check_header(header)
            self._spare_for(header.key, header.bytes)

    def heard(self, node: int, held: tuple[Key, ...]) -> None:
        """Another keeper reported what it holds, perhaps before it learned what is doubtful;
        nothing: it is lost.
        """
        with self._lock:
            self._others[node] = self._trusted(held)
            self._retain()

    def forget(self, step: int, before: int) -> tuple[Key, ...]:
        """Release what generations before ``before`` saved after ``step``, and accept no more of
        it; returns what was released.
        """
        with self._lock:
            self._doubts = together([*self._doubts, (before, step)])
            gone = tuple(key for key in self._entries if self._doubtful(key))
            for key in gone:
                self._drop(self._entries.pop(key))
            self._others = {node: self._trusted(held) for node, held in self._others.items()}
            return gone

    def known_at(self, node: int) -> tuple[Key, ...]:
        """What another keeper holds by its last report."""
        with self._lock:
            return self._others.get(node, ())

    def held(self) -> tuple[Key, ...]:
        """The parts held here, oldest first."""
        with self._lock:
            return tuple(sorted(self._entries, key=lambda key: (key.moment, key.shard)))

    def own(self) -> list[Key]:
        """What ranks of this node have saved here, oldest first."""
        with self._lock:
            own = [key for key, entry in self._entries.items() if not entry.copy]
        return sorted(own, key=lambda key: key.moment)

    def take_released(self, seat: str) -> tuple[int, ...]:
        """Buffers of a seat that are free again, each returned once."""
        with self._lock:
            return tuple(self._released.pop(seat, ()))

    @contextmanager
    def lent(self, key: Key) -> Iterator[HeldPart | None]:
        """An entry whose buffer is not reused as long as the block lasts; None: it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.readers += 1
        try:
            yield entry
        finally:
            if entry is not None:
                with self._lock:
                    entry.readers -= 1
                    if entry.dropped and not entry.readers:
                        self._let_go(entry)

    # ---- with the lock held

    def _check(self, header: Header, fd: int, size: int) -> None:
        self._check_header(header)
        if size < header.bytes:
            raise Refusal(
                f"its file has {size} bytes, and its header says {header.bytes}: the save was torn"
            )
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            raise Refusal("it comes in a file that is no memory file") from None
        if not sealed:  # a file that can shrink could crash the process that maps it
            raise Refusal("its file is not sealed against shrinking")

    def _check_header(self, header: Header) -> None:
        if header.job != self._job:
            raise Refusal(f"it is of job {header.job!r}, and this keeper serves {self._job!r}")
        newest = max((key.generation for key in self._all()), default=0)
        if self._doubtful(header.key):
            raise Refusal(
                f"{header.key.label} may hold a corrupted state: what was saved then is not trusted"
            )
        if header.key.generation < newest:
            raise Refusal(f"generation {header.key.generation} is over: {newest} has saved")

    def _doubtful(self, key: Key) -> bool:
        return in_doubt(self._doubts, generation=key.generation, step=key.step)

    def _trusted(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        return tuple(key for key in keys if not self._doubtful(key))

    def _all(self) -> list[Key]:
        return [*self._entries, *(key for held in self._others.values() for key in held)]

    def _spare_for(self, key: Key, size: int) -> list[HeldPart]:
        """Older checkpoints that have to go for a new part; empty if there is room. Raises
        Refusal.
        """
        old = self._entries.get(key)
        used = sum(entry.size for entry in self._entries.values()) - (old.size if old else 0)
        over = used + size - self._limit_bytes
        if over <= 0:
            return []
        safe = complete(self._all(), copies=2 if self._doubles else 1)
        older = [k for k in self._entries if safe and k.moment < safe[-1] and k != key]
        spare = []
        for other in sorted(older, key=lambda k: k.moment):
            if over > 0:
                spare.append(self._entries[other])
                over -= spare[-1].size
        if over > 0:
            raise Refusal(
                f"the memory for checkpoints is full: {_mb(used)} of {_mb(self._limit_bytes)} are"
                f" held, and {key.label} needs {_mb(size)}: raise the limit to"
                f" {_mb(self._limit_bytes + over)} or more, shard the state over more ranks, or"
                " save to disk instead"
            )
        return spare

    def _retain(self) -> None:
        whole = complete(self._all())
        if len(whole) <= self._keep:
            return
        oldest = whole[-self._keep]
        for key in [key for key in self._entries if key.moment < oldest]:
            self._drop(self._entries.pop(key))

    def _drop(self, entry: HeldPart) -> None:
        entry.dropped = True
        if not entry.readers:
            self._let_go(entry)

    def _let_go(self, entry: HeldPart) -> None:
        os.close(entry.fd)
        if not entry.copy:
            released, seat = self._released, entry.header.seat
            released[seat] = [*released.pop(seat, ()), entry.header.buffer]
            # the oldest; a process without an answer gives its buffers up itself
            while len(released) > MOST_SEATS:
                del released[next(iter(released))]


def _mb(size: int) -> str:
    """In MB, rounded up, so that following the advice is enough."""
    return f"{-(-size // 10_000) / 100:.2f} MB"
