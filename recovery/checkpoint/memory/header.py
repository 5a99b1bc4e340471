"""Describes one part of a checkpoint in memory: its job, the layout of its tensors, the checksums
of its bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.transport.stream import Record

VERSION = 3  # of messages and headers
PIECE_BYTES = 4 << 20  # as on disk: small enough for a cache, large enough for speed
MAX_STEP = 10**12
_PREFIX = "memory-"

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


class TensorPart(Record):
    """One tensor, or this shard's part of it. ``shape``: of the whole tensor; ``start``, ``sizes``:
    of the part in it, by dimension; ``offset``: of its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: _Count
    bytes: _Count


class Header(Record, kw_only=True):
    """``job``: the run it belongs to; ``bytes``: of the data; ``sums``: checksum of each
    ``piece_bytes`` of it (XXH3-128: it finds corruption, not forgery); ``scalars``: the rest of the
    state; ``seat``, ``buffer``: the process that owns the memory, and which of its buffers.
    """

    version: Literal[1] = 1
    job: str
    key: Key
    bytes: _Count
    piece_bytes: Annotated[int, Meta(ge=1)] = PIECE_BYTES
    sums: tuple[str, ...]
    parts: tuple[TensorPart, ...]
    scalars: dict[str, Any]
    seat: str
    buffer: _Count

    def __post_init__(self) -> None:
        if len(self.sums) != -(-self.bytes // self.piece_bytes):
            raise ValueError(f"{len(self.sums)} checksums for {self.bytes} bytes")
        for part in self.parts:
            if part.offset + part.bytes > self.bytes:
                raise ValueError(f"{part.name} ends after the data")
            if not len(part.shape) == len(part.start) == len(part.sizes):
                raise ValueError(f"{part.name} has dimensions that do not fit together")


def name_of(step: int) -> str:
    """Name of a checkpoint in memory in events; distinct from those on disk."""
    return f"{_PREFIX}step-{step:08d}"


def is_memory(checkpoint: str) -> bool:
    """Whether a name is one of ``name_of``."""
    return checkpoint.startswith(_PREFIX)


def sums_of(
    data: memoryview, piece_bytes: int = PIECE_BYTES, *, progress: Callable[[], None] | None = None
) -> tuple[str, ...]:
    """Checksums of the pieces of some bytes; ``progress`` is called after each."""
    found = []
    for start in range(0, len(data), piece_bytes):
        found.append(pieces.checksum(data[start : start + piece_bytes]))
        if progress is not None:
            progress()
    return tuple(found)


def mismatch(
    header: Header,
    data: memoryview,
    progress: Callable[[], None] | None = None,
    *,
    numbers: range | None = None,
) -> str | None:
    """Which bytes differ from the header's checksums, or None. ``numbers``: of the pieces to check,
    default: all.
    """
    if len(data) < header.bytes:
        return f"{len(data)} bytes, not {header.bytes}"
    size = header.piece_bytes
    for number in range(len(header.sums)) if numbers is None else numbers:
        start, end = number * size, min((number + 1) * size, header.bytes)
        if pieces.checksum(data[start:end]) != header.sums[number]:
            return f"bytes {start} to {end} do not match their checksum"
        if progress is not None:
            progress()
    return None


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
