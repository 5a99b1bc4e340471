"""Tells that a process is dying before anything else does.

A killed process of torch takes 5 to 70 ms to give back its memory, and only then does its pidfd
become readable and do its sockets close. Before that the kernel walks the dying thread's list of
*robust* locks and wakes whoever waits for them (``exit_robust_list``, set_robust_list(2)). So the
rank's main thread takes such a lock, in memory shared with its supervisor, for life, and a thread
of the supervisor waits for it (pthread_mutexattr_setrobust(3)).

It is a hint: the lock is also given up when the process executes another program. The supervisor
asks the kernel whether it is really dying (``recovery.process.processes.is_exiting``), and the
pidfd tells how it ended.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from collections.abc import Callable

SIZE = mmap.ALLOCATIONGRANULARITY
LOOK_EVERY_S = 0.5
_HELD = 2048  # the lock comes first: 40 bytes on x86-64, 48 on arm64


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """A page of shared memory, zeroed at first: ``fd`` holds it at ``offset``."""

    def __init__(self, fd: int, offset: int) -> None:
        self._map = mmap.mmap(fd, SIZE, offset=offset)
        self._memory = (ctypes.c_char * SIZE).from_buffer(self._map)
        self._lock = ctypes.c_void_p(ctypes.addressof(self._memory))
        self._libc = ctypes.CDLL(None)

    def hold(self) -> None:
        """Take the lock; by the thread whose end is the process's, once. Without robust locks
        nothing happens.
        """
        attributes = (ctypes.c_char * 64)()
        try:
            self._libc.pthread_mutexattr_init(attributes)
            wrong = self._libc.pthread_mutexattr_setpshared(attributes, 1)
            wrong = wrong or self._libc.pthread_mutexattr_setrobust(attributes, 1)
            wrong = wrong or self._libc.pthread_mutex_init(self._lock, attributes)
            wrong = wrong or not self._libc.pthread_mutex_clocklock  # of glibc 2.30
            wrong = wrong or self._libc.pthread_mutex_trylock(self._lock)
        except AttributeError:  # another C library
            return
        if not wrong:
            self._memory[_HELD] = b"\x01"

    @property
    def held(self) -> bool:
        """Whether it makes sense to wait."""
        return bool(self._memory[_HELD] != b"\x00")

    def wait(self, stop: Callable[[], bool]) -> bool:
        """Wait until the holder is dying; False when ``stop``, polled every LOOK_EVERY_S, returns
        true.
        """
        while not stop():
            until_s = time.monotonic() + LOOK_EVERY_S
            limit = _Timespec(int(until_s), int(until_s % 1 * 1e9))
            found = self._libc.pthread_mutex_clocklock(
                self._lock, time.CLOCK_MONOTONIC, ctypes.byref(limit)
            )
            if found != errno.ETIMEDOUT:
                return bool(found == errno.EOWNERDEAD)
        return False

    def close(self) -> None:
        """Release the memory; no thread of this process may still wait."""
        del self._memory
        self._map.close()
