"""File-system operations that Python lacks: an atomic exchange of directories, early writeback, and
removal and syncing that report progress.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_CWD = -100
_BEGIN, _WAIT = 2, 7  # flags of sync_file_range(2): WRITE; and with it WAIT_BEFORE and WAIT_AFTER
RANGE_BYTES = 32 << 20
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def put_in_place(staging: Path, final: Path, trash: Path) -> Callable[[], object]:
    """Move ``staging`` to ``final``, or exchange the two where ``final`` exists; returns a function
    that undoes it.

    Where names cannot be exchanged the old one lies at ``trash`` for a moment. Raises OSError; then
    nothing has moved.
    """
    if not final.exists():
        staging.rename(final)
        return lambda: final.rename(staging)
    try:
        exchange(staging, final)
        return lambda: exchange(staging, final)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    remove(trash)
    final.rename(trash)
    try:
        staging.rename(final)
    except OSError:
        trash.rename(final)
        raise

    def take_back() -> None:
        final.rename(staging)
        trash.rename(final)

    return take_back


def exchange(one: Path, other: Path) -> None:
    """Exchange two names at once. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(_CWD, os.fsencode(one), _CWD, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def fsync_directory(path: Path) -> None:
    """Make its entries durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path, progress: Callable[[], None] | None = None) -> None:
    """Delete a file or a directory with all in it, as far as the file system lets us; of a link
    itself, never what it leads to. ``progress``: called after each entry, since one large file may
    take a slow disk seconds.
    """
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            with os.scandir(path) as entries:
                for entry in list(entries):
                    remove(Path(entry.path), progress)
            os.rmdir(path)
        else:
            os.unlink(path)
    except OSError:
        return
    if progress is not None:
        progress()


def await_writeback(fd: int, size: int, progress: Callable[[], None]) -> None:
    """Wait until the disk has the bytes of a file, range by range, so that the fsync that has to
    follow is short. It may not wait: nothing depends on it.
    """
    libc = ctypes.CDLL(None)
    for start in range(0, size, RANGE_BYTES) if hasattr(libc, "sync_file_range") else ():
        length = min(RANGE_BYTES, size - start)
        libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(length), _WAIT)
        progress()


def begin_writeback(fd: int, offset: int, size: int) -> None:
    """Have the disk begin with these bytes now instead of at the fsync, while more are copied and
    hashed. It may not: nothing depends on it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sync_file_range"):
        libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _BEGIN)
