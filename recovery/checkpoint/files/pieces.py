"""Pieces: the unit in which checkpoint files are written, checked and read. No torch here.

A data file is a *stream* of bytes cut into pieces of a few MiB, each with its checksum. A piece
lies in the file itself, or, in a delta checkpoint, in the file of the same name of an older
checkpoint.

The checksum is XXH3-128 (https://github.com/Cyan4973/xxHash): it finds torn writes, bit rot and
mixed-up files at memory speed. It does not guard against forgery, and neither does anything else
here: a writer of the data can write the manifest too.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash

LARGEST = 4 << 20  # bytes; what is read should still be in a cache when it is hashed
SMALLEST = 64 << 10  # bytes
PIECES = 1024  # in a file, within these bounds: more make the manifest large, fewer a delta coarse
ALIGN = 64  # tensors start at multiples of it, and pieces end there, so none splits a number
ALGORITHM = "xxh3-128"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class CorruptCheckpoint(Exception):
    """The checkpoint does not match its manifest; the message says which file and how."""


class Piece(NamedTuple):
    """``where``: "" for the checkpoint's own file, else the name of the older checkpoint that holds
    these bytes; ``offset``, ``size``: bytes in that file; ``sum``: hexadecimal checksum.
    """

    where: str
    offset: _Count
    size: _Count
    sum: str


Use = Callable[[int, memoryview], None]
"""Called with a piece's number and its verified bytes, which it must not keep; from several
threads.
"""


Source = Path | memoryview
"""Where the bytes of a file are: on a disk, or mapped memory."""

Progress = Callable[[], None]
"""Called as work goes on, by any thread, so that it is not taken for a hang."""


def quiet() -> None:
    """Ignores progress."""


def workers() -> int:
    """Threads that read and check: one for each CPU this process may use, at most 4 (enough to keep
    a disk busy).
    """
    return max(1, min(4, len(os.sched_getaffinity(0))))


def piece_bytes(total: int) -> int:
    """Size of the pieces of a stream: within SMALLEST and LARGEST, and at least two pieces, so that
    progress shows.

    Where there are many it is a multiple of SMALLEST, so of the page size: a write that begins in
    the middle of a page waits for the one before to reach the disk.
    """
    half = max(1, (total + 1) // 2)
    size = min(max(total // PIECES, SMALLEST), LARGEST, half)
    unit = SMALLEST if size >= SMALLEST else ALIGN
    return min(-(-size // unit) * unit, LARGEST)


def cut(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Place parts of so many bytes one after the other, aligned; returns their offsets and
    the end.
    """
    ends = list(itertools.accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0))
    return ends[:-1], ends[-1]


def checksum(*parts: memoryview | bytes) -> str:
    """Of some bytes given in parts; hexadecimal."""
    if len(parts) == 1:
        return xxhash.xxh3_128_hexdigest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def parse(raw: Any) -> list[Piece]:
    """Pieces that were read from JSON. Raises CorruptCheckpoint."""
    try:
        return msgspec.convert(raw, list[Piece])
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(f"the manifest cannot be read: {error}") from None


def of_memory(data: memoryview) -> Iterator[Piece]:
    """Pieces of bytes in memory."""
    size = piece_bytes(len(data))
    for offset in range(0, len(data), size):
        piece = data[offset : offset + size]
        yield Piece("", offset, len(piece), checksum(piece))


def of_file(path: Path) -> list[Piece]:
    """Cut a file into pieces by reading it. Raises OSError."""
    total = path.stat().st_size
    size, found = piece_bytes(total), []
    with open(path, "rb", buffering=0) as stream:
        buffer = memoryview(bytearray(size))
        for offset in range(0, total, size):
            length = _fill(stream.fileno(), buffer[: min(size, total - offset)], offset)
            found.append(Piece("", offset, length, checksum(buffer[:length])))
    return found


def check(
    pieces: Sequence[Piece],
    name: str,
    source_of: Callable[[str], Source],
    use: Use | None = None,
    *,
    progress: Progress = quiet,
) -> None:
    """Read pieces of the file ``name``, compare each with its checksum, and hand it to ``use``.

    ``source_of``: a piece's ``where`` -> where that file lies; ``progress``: called after each
    piece, and may raise to end it.

    Of several that are wrong the first piece is named, whichever thread was faster: a failure stops
    those that read later ones. Raises CorruptCheckpoint, and whatever ``use`` and ``progress``
    raise.
    """
    count = min(workers(), len(pieces))
    if not count:
        return
    errors: dict[int, BaseException] = {}
    largest = max(piece.size for piece in pieces)

    def work(share: int) -> None:
        """One run of pieces per thread: the kernel reads ahead for sequential reads."""
        buffer = memoryview(bytearray(largest))
        opened: dict[str, int | memoryview] = {}
        try:
            for number in range(len(pieces) * share // count, len(pieces) * (share + 1) // count):
                if any(failed < share for failed in list(errors)):
                    return
                data = _verified(pieces[number], name, source_of, opened, buffer)
                if use is not None:
                    use(number, data)
                progress()
        except BaseException as error:
            errors[share] = error
        finally:
            for fd in opened.values():
                if isinstance(fd, int):
                    os.close(fd)

    others = [
        threading.Thread(target=work, args=(n,), name=f"check-{n}", daemon=True)
        for n in range(1, count)
    ]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()  # each thread stops after its current piece
    if errors:
        raise errors[min(errors)]


def _verified(
    piece: Piece,
    name: str,
    source_of: Callable[[str], Source],
    opened: dict[str, int | memoryview],
    buffer: memoryview,
) -> memoryview:
    called = f"{piece.where}/{name}" if piece.where else name
    try:
        if piece.where not in opened:
            opened[piece.where] = _opened(source_of(piece.where))
        source = opened[piece.where]
        if isinstance(source, memoryview):
            data = source[piece.offset : piece.offset + piece.size]
        else:
            data = buffer[: _fill(source, buffer[: piece.size], piece.offset)]
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{called} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"a data file cannot be read: {error.strerror}") from error
    if len(data) < piece.size:
        raise CorruptCheckpoint(f"{called} ends at byte {piece.offset + len(data)}, within a piece")
    found = checksum(data)
    if found != piece.sum:
        raise CorruptCheckpoint(
            f"{called} has checksum {found[:12]}, not {piece.sum[:12]}, "
            f"in bytes {piece.offset} to {piece.offset + piece.size}"
        )
    return data


def _opened(source: Source) -> int | memoryview:
    if isinstance(source, memoryview):
        return source
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def _fill(fd: int, buffer: memoryview, offset: int) -> int:
    """Read until the buffer is full or the file ends; returns the bytes read."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done
