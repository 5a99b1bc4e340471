"""One part of a checkpoint in memory: what its header says, and the anonymous file it lies in,
which several processes share by a descriptor and which outlives the process that wrote it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.pieces import Piece
from trainchaos.recovery.transport.stream import Record

VERSION = 4  # of messages and headers
MAX_STEP = 10**12
RANGE_BYTES = 32 << 20
_PREFIX = "memory-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since 5.14

Moment = tuple[int, int]
"""(generation, step): orders checkpoints. A later generation's checkpoint counts, whatever its
step: it may have gone back on purpose.
"""


_Count = Annotated[int, Meta(ge=0)]


class Key(Record):
    """Names a part of a checkpoint: shard ``shard`` of ``shards``, saved after ``step`` by
    ``generation``.
    """

    generation: _Count
    step: Annotated[int, Meta(ge=0, le=MAX_STEP)]
    shard: _Count
    shards: Annotated[int, Meta(ge=1)]

    def __post_init__(self) -> None:
        if self.shard >= self.shards:
            raise ValueError(f"shard {self.shard} of {self.shards}")

    @property
    def moment(self) -> Moment:
        """Moment of the whole checkpoint."""
        return self.generation, self.step

    @property
    def label(self) -> str:
        """For people."""
        part = f", shard {self.shard} of {self.shards}" if self.shards > 1 else ""
        return f"step {self.step} of generation {self.generation}{part}"


class Header(Record, kw_only=True):
    """``job``: the run it belongs to; ``bytes``: of the data; ``pieces``, ``tensors``, ``scalars``:
    as the manifest of a checkpoint on disk has them; ``seat``, ``buffer``: the process that owns
    the memory, and which of its buffers.
    """

    version: Literal[2] = 2
    job: str
    key: Key
    bytes: _Count
    pieces: tuple[Piece, ...]
    tensors: dict[str, Any]
    scalars: dict[str, Any]
    seat: str
    buffer: _Count

    def __post_init__(self) -> None:
        end = 0
        for piece in self.pieces:
            if piece.where or piece.offset != end:
                raise ValueError(f"its pieces do not meet at byte {end}")
            end += piece.size
        if end != self.bytes:
            raise ValueError(f"pieces of {end} bytes for {self.bytes}")

    def mismatch(self, data: memoryview) -> str | None:
        """Which bytes differ from their checksums, or None."""
        for _, offset, size, digest in self.pieces:
            if pieces.checksum(data[offset : offset + size]) != digest:
                return f"bytes {offset} to {offset + size} do not match their checksum"
        return None


def name_of(step: int) -> str:
    """Name of a checkpoint in memory in events; distinct from those on disk."""
    return f"{_PREFIX}step-{step:08d}"


def is_memory(checkpoint: str) -> bool:
    """Whether a name is one of ``name_of``."""
    return checkpoint.startswith(_PREFIX)


def complete(keys: Iterable[Key], *, copies: int = 1) -> list[Moment]:
    """Checkpoints of which every shard is held at least ``copies`` times, oldest first."""
    found: dict[tuple[Moment, int], list[int]] = defaultdict(list)
    for key in keys:
        found[key.moment, key.shards].append(key.shard)
    whole = [
        moment
        for (moment, shards), held in found.items()
        if all(held.count(shard) >= copies for shard in range(shards))
    ]
    return sorted(set(whole))


def shards_at(keys: Sequence[Key], moment: Moment) -> int:
    """Number of shards of the checkpoint of a moment."""
    return next(key.shards for key in keys if key.moment == moment)


# ---- the file


@dataclass(kw_only=True)
class MemoryFile:
    """``data``: all of it, mapped; ``fd``: ours to close."""

    fd: int
    data: memoryview

    def close(self) -> None:
        """Release the memory, unless another process holds the file; a mapping in use stays until
        it is released.
        """
        with suppress(BufferError):  # a tensor still uses it
            self.data.release()
        os.close(self.fd)

    def detach(self) -> int:
        """Close the mapping and hand over the descriptor."""
        self.data.release()
        return self.fd


def create(size: int, *, name: str, progress: Callable[[], None] = lambda: None) -> MemoryFile:
    """A new file of so many bytes, at least one, that cannot change its size, with all of its
    memory: the kernel provides it now, rather than page by page in a copy. ``progress``: called
    every 32 MB. Raises OSError when there is no memory.

    Its contents cannot be sealed: the buffers are used again, since fresh memory costs several
    times a copy.
    """
    size = max(1, size)
    fd = os.memfd_create(f"checkpoint-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return MemoryFile(fd=fd, data=_mapped(fd, mmap.ACCESS_WRITE, progress))
    except BaseException:
        os.close(fd)
        raise


def view(fd: int, progress: Callable[[], None] = lambda: None) -> MemoryFile:
    """Map a file received from another process for reading; its descriptor is then ours.
    ``progress``: called every 32 MB. Raises OSError.
    """
    # private: an erroneous write by a reader reaches no other process
    return MemoryFile(fd=fd, data=_mapped(fd, mmap.ACCESS_COPY, progress))


def _mapped(fd: int, access: int, progress: Callable[[], None]) -> memoryview:
    mapped = mmap.mmap(fd, os.fstat(fd).st_size, access=access)
    advice = _MADV_POPULATE_WRITE if access == mmap.ACCESS_WRITE else _MADV_POPULATE_READ
    with suppress(OSError):  # an older kernel: page by page, then
        for start in range(0, len(mapped), RANGE_BYTES):
            mapped.madvise(advice, start, min(RANGE_BYTES, len(mapped) - start))
            progress()
    return memoryview(mapped)
