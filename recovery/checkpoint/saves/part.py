"""Writes one rank's part of a checkpoint: one file, in one pass from the tensors' own memory.

Checksums, and whether the values are finite, are computed on another thread meanwhile; nothing is
read back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.checkpoints import Disk
from trainchaos.recovery.checkpoint.files.pieces import Piece
from trainchaos.recovery.checkpoint.saves.chunks import Chunk, first_not_finite, on_host
from trainchaos.recovery.state.strides import Progress, quiet
from trainchaos.recovery.transport.atomic_rename import await_writeback, begin_writeback

MOST_AT_ONCE = 1024  # buffers given to the kernel in one call: IOV_MAX of Linux
LOOK_BYTES = 1 << 20  # checked by one task
BATCH_BYTES = 8 << 20  # written at once, and at least two in a file, so that progress shows
Known = Callable[[int, str], Piece | None]
"""Size and checksum of a piece -> where an older checkpoint holds the same bytes, or None."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """What one rank wrote. ``tensors``: name -> {"dtype", "shape", "chunks": [{"at", "size",
    "offset"}]}, the offset being that in the stream of pieces; ``delta``: how many checkpoints on
    from the last full one this is; ``stage``: scalars of parameters that others may not have.
    """

    file: str
    stream: list[Piece]
    tensors: dict[str, dict[str, Any]]
    delta: int = 0
    stage: dict[str, Any] | None = None


def file_of(writer: int) -> str:
    """Name of a writer's data file."""
    return f"rank-{writer:04d}.bin"


def write_part(
    staging: Path,
    writer: int,
    chunks: Sequence[Chunk],
    tensors: dict[str, dict[str, Any]],
    *,
    disk: Disk,
    known: Known | None = None,
    delta: int = 0,
    progress: Progress = quiet,
) -> CheckpointPart:
    """Write and sync ``chunks``; ``tensors``: dtype and shape of every tensor of the state;
    ``known``: finds bytes that are stored already; ``progress``: called, by any thread, at least
    every 32 MB that are copied, checked or written.

    Raises OSError when the disk refuses, RuntimeError for a state that is not finite: restoring it
    would be useless.
    """
    offsets, end = pieces.cut([chunk.bytes for chunk in chunks])
    path = staging / file_of(writer)
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as pool:
        finite = [pool.submit(first_not_finite, some, progress) for some in _together(chunks)]
        try:
            bytes_ = list(_stream(chunks, offsets, end, progress))
            stream = _write_stream(path, bytes_, pool, disk, known, progress)
            bad = next((found for each in finite if (found := each.result()) is not None), None)
            if bad is not None:
                raise RuntimeError(f"the state is not finite ({bad}), so it is not saved")
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    table = {name: {**entry, "chunks": []} for name, entry in tensors.items()}
    for chunk, offset in zip(chunks, offsets, strict=True):
        place = {"at": list(chunk.at), "size": list(chunk.size), "offset": offset}
        table[chunk.name]["chunks"].append(place)
    return CheckpointPart(file=path.name, stream=stream, tensors=table, delta=delta)


def _together(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks in groups of some size: of most states there are many small ones."""
    group, size = list[Chunk](), 0
    for chunk in chunks:
        group.append(chunk)
        size += chunk.bytes
        if size >= LOOK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _stream(
    chunks: Sequence[Chunk], offsets: Sequence[int], end: int, progress: Progress
) -> Iterator[list[memoryview]]:
    """The bytes of the stream, piece by piece, each as a list of buffers."""
    room = size = pieces.piece_bytes(end)
    parts: list[memoryview] = []
    padding = memoryview(bytes(pieces.ALIGN))
    for chunk, offset, following in zip(chunks, offsets, [*offsets, end][1:], strict=True):
        data = on_host(chunk.data, progress)
        for view in (data, padding[: following - offset - len(data)]):
            while len(view) >= room:
                parts.append(view[:room])
                yield parts
                view, parts, room = view[room:], [], size
            if len(view):
                parts.append(view)
                room -= len(view)
    if parts:
        yield parts


def _write_stream(
    path: Path,
    stream: Sequence[list[memoryview]],
    pool: ThreadPoolExecutor,
    disk: Disk,
    known: Known | None,
    progress: Progress,
) -> list[Piece]:
    def checksum(parts: list[memoryview]) -> str:
        digest = pieces.checksum(*parts)
        progress()
        return digest

    sums: list[Future[str]] = [pool.submit(checksum, parts) for parts in stream]
    sizes = [sum(len(part) for part in parts) for parts in stream]
    made: list[tuple[int, Piece | None]] = []
    with _Out(path, disk, batch=min(BATCH_BYTES, max(1, sum(sizes) // 2))) as out:
        for parts, size, digest in zip(stream, sizes, sums, strict=True):
            old = known(size, digest.result()) if known is not None else None
            made.append((out.end, old))
            if old is None:
                out.put(parts, size)
        out.finish(progress)
    return [
        old or Piece("", offset, size, digest.result())
        for (offset, old), size, digest in zip(made, sizes, sums, strict=True)
    ]


class _Out:
    """A file that is written in batches. ``end``: bytes put so far."""

    def __init__(self, path: Path, disk: Disk, *, batch: int) -> None:
        self._path = path
        self._disk = disk
        self._batch = batch
        self._parts: list[memoryview] = []
        self._waiting = 0
        self.end = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> _Out:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def put(self, parts: Sequence[memoryview], size: int) -> None:
        """Write these bytes, now or with those that follow. Raises OSError."""
        self._parts += parts
        self._waiting += size
        self.end += size
        if self._waiting >= self._batch:
            self._write()

    def finish(self, progress: Progress) -> None:
        """Write what is left, and sync. Raises OSError."""
        if self._waiting:
            self._write()
        self._disk("fsync", self._path)
        await_writeback(self._fd, self.end, progress)
        os.fsync(self._fd)

    def _write(self) -> None:
        self._disk("write", self._path)
        start, size = self.end - self._waiting, self._waiting
        _write_all(self._fd, self._parts, start)
        begin_writeback(self._fd, start, size)
        self._parts, self._waiting = [], 0


def _write_all(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    total = sum(len(part) for part in parts)
    if len(parts) > MOST_AT_ONCE:
        parts = [memoryview(b"".join(parts))]
    done = os.pwritev(fd, parts, offset)
    if done < total:  # the kernel may take less than it is given; the next call says why
        rest = memoryview(b"".join(parts))
        while done < total:
            done += os.pwrite(fd, rest[done:], offset + done)
