"""Room on a disk: kept for a file, or said to be none."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress

_KEEP_SIZE = 0x1  # include/uapi/linux/falloc.h


def reserve(fd: int, offset: int, length: int) -> bool:
    """Have room kept for a file behind ``offset``, whose size stays as it is; whether it is."""
    with suppress(AttributeError):  # another C library
        call = ctypes.CDLL(None).fallocate
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        return bool(call(fd, _KEEP_SIZE, offset, length) == 0)
    return False


def full() -> OSError:
    """As the kernel says it."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
