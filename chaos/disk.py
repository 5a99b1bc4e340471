"""Reserves disk space for a file, and makes the error for a full disk."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress

_KEEP_SIZE = 0x1  # include/uapi/linux/falloc.h


def reserve(fd: int, offset: int, length: int) -> bool:
    """Reserve ``length`` bytes of disk space behind ``offset`` without changing the file's size;
    returns whether that worked.
    """
    with suppress(AttributeError):  # another C library
        call = ctypes.CDLL(None).fallocate
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        return bool(call(fd, _KEEP_SIZE, offset, length) == 0)
    return False


def full() -> OSError:
    """The kernel's error for a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
