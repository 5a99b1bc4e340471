"""Anonymous memory files: bytes that several processes share by a descriptor and that outlive the
process that wrote them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

RANGE_BYTES = 32 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since 5.14


@dataclass(kw_only=True)
class MemoryFile:
    """``data``: all of it, mapped; ``fd``: ours to close."""

    fd: int
    data: memoryview

    def close(self) -> None:
        """Release the memory, unless another process holds the file; a mapping in use stays until
        it is released.
        """
        try:
            self.data.release()
        except BufferError:
            pass  # a tensor still uses it
        os.close(self.fd)

    def detach(self) -> int:
        """Close the mapping and hand over the descriptor."""
        self.data.release()
        return self.fd


def create(size: int, *, name: str) -> MemoryFile:
    """A new file of so many bytes, at least one, that cannot change its size. Raises OSError when
    there is no memory.

    Its contents cannot be sealed: the buffers are used again, since fresh memory costs several
    times a copy.
    """
    fd = os.memfd_create(f"checkpoint-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, max(1, size))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return MemoryFile(fd=fd, data=_mapped(fd, max(1, size), write=True))
    except BaseException:
        os.close(fd)
        raise


def view(fd: int, progress: Callable[[], None] | None = None) -> MemoryFile:
    """Map a file received from another process for reading; its descriptor is then ours.
    ``progress``: called every 32 MB. Raises OSError.
    """
    file = MemoryFile(fd=fd, data=_mapped(fd, max(1, os.fstat(fd).st_size), write=False))
    _advise(file, _MADV_POPULATE_READ, progress)
    return file


def populate(file: MemoryFile, progress: Callable[[], None] | None = None) -> None:
    """Have the kernel provide all of its memory now, rather than page by page in a copy; without
    effect where it cannot. ``progress``: called every 32 MB.
    """
    _advise(file, _MADV_POPULATE_WRITE, progress)


def _advise(file: MemoryFile, advice: int, progress: Callable[[], None] | None = None) -> None:
    mapped = file.data.obj
    assert isinstance(mapped, mmap.mmap)
    try:
        for start in range(0, len(mapped), RANGE_BYTES):
            mapped.madvise(advice, start, min(RANGE_BYTES, len(mapped) - start))
            if progress is not None:
                progress()
    except OSError:
        pass  # an older kernel: page by page, then


def _mapped(fd: int, size: int, *, write: bool) -> memoryview:
    # Private where it is only read: an erroneous write by a reader reaches no other process.
    access = mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY
    return memoryview(mmap.mmap(fd, size, access=access))
