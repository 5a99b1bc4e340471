"""What Python does not offer of the file system: directories that change place at once, and writeback begun early."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_CWD = -100
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2)
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def put_in_place(staging: Path, final: Path, trash: Path) -> Callable[[], object]:
    """Move ``staging`` to ``final``, or exchange the two where ``final`` exists; returns how to take it back.

    Where names cannot be exchanged the old one lies at ``trash`` for a moment. Raises OSError; then nothing has moved.
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
    shutil.rmtree(trash, ignore_errors=True)
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


def begin_writeback(fd: int, offset: int, size: int) -> None:
    """Have the disk begin with these bytes now instead of at the fsync, while more are copied and hashed. It may not:
    nothing depends on it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sync_file_range"):
        libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _BEGIN)
