"""A rank's event lines on their way to its file: stores to shared memory on the training path, the
file behind it.

The ring lies behind the progress marks, in the same anonymous memory. A thread of the rank moves
whole lines from it to the file; what is left there when the rank dies, its supervisor moves once
the rank is reaped. The file is always a prefix of what was put into the ring, so its size alone
says what is still to be written: no line is lost or doubled, whoever was killed in the middle of
what.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.log import EventWriter, Kind

CAPACITY = 1 << 20
DRAIN_EVERY_S = 0.02
PATIENCE_S = (
    # with a disk that is slow: a rank that waits for it longer would be taken for one that hangs
    0.2
)
END_LIMIT_S = 60.0
_HEADER = mmap.ALLOCATIONGRANULARITY
SIZE = _HEADER + CAPACITY
_HEAD, _TAIL = range(2)


def used() -> dict[str, Any]:
    """What this process has used so far: the peak of its resident memory, pages shared with others
    included, and its processor time.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"peak_rss_bytes": usage.ru_maxrss * 1024, "cpu_s": usage.ru_utime + usage.ru_stime}


class LineRing:
    """``fd``: memory that holds the ring at ``offset``, zeroed at first.

    ``head``: bytes ever put in, advanced after they are stored; ``tail``: bytes known to be in the
    file. Both are one aligned word, written by one process.
    """

    def __init__(self, fd: int, offset: int) -> None:
        self._map = mmap.mmap(fd, SIZE, offset=offset)
        self._view = memoryview(self._map)
        self._words = self._view[:16].cast("q")
        self._bytes = self._view[_HEADER:]

    @property
    def head(self) -> int:
        """Bytes ever put in."""
        return self._words[_HEAD]

    @property
    def used(self) -> int:
        """Bytes that wait for the file."""
        return self._words[_HEAD] - self._words[_TAIL]

    def put(self, line: bytes) -> bool:
        """Store a line; False when there is no room for it now. For one thread at a time."""
        head, length = self._words[_HEAD], len(line)
        if head + length - self._words[_TAIL] > CAPACITY:
            return False
        at = head % CAPACITY
        first = min(length, CAPACITY - at)
        self._bytes[at : at + first] = line[:first]
        if first < length:
            self._bytes[: length - first] = line[first:]
        self._words[_HEAD] = head + length  # only now does the line exist
        return True

    def passed(self, length: int) -> None:
        """Count bytes that went to the file by another way, while the ring was empty."""
        self._words[_TAIL] = self._words[_HEAD] = self._words[_HEAD] + length

    def drain(self, fd: int) -> None:
        """Append to the file what it lacks. Raises OSError; nothing is lost then. For one thread at
        a time.
        """
        head, tail = self._words[_HEAD], self._words[_TAIL]
        while tail < head:
            tail += os.writev(fd, self._parts(tail, head))
            self._words[_TAIL] = tail

    def salvage(self, path: Path) -> None:
        """Complete the file of a process that is reaped. Raises OSError."""
        # A disk that was full may have kept the process from making the file.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if self.head else 0), 0o644)
        try:
            size, head = os.fstat(fd).st_size, self.head
            if size > head:
                _cut_torn_line(fd, size)
                return
            os.lseek(fd, 0, os.SEEK_END)
            # It may have been killed between writing and noting so: the size counts, not the tail.
            start = max(size, self._words[_TAIL])
            while start < head:
                start += os.writev(fd, self._parts(start, head))
        finally:
            os.close(fd)

    def close(self) -> None:
        for view in (self._words, self._bytes, self._view):
            view.release()
        self._map.close()

    def _parts(self, start: int, end: int) -> list[memoryview]:
        at, length = start % CAPACITY, end - start
        first = min(length, CAPACITY - at)
        return [self._bytes[at : at + first], self._bytes[: length - first]]


def _cut_torn_line(fd: int, size: int) -> None:
    """End a file after its last whole line: a line too long for the ring goes straight to the file,
    and may tear.
    """
    end, block = size, 1 << 16
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)


class RingWriter(EventWriter):
    """Writes events into a ring; a thread moves them to the file every ``DRAIN_EVERY_S``.

    The training path makes no system call. When the ring is full the writer moves lines itself;
    when the file does not take them, or not within ``PATIENCE_S``, events are dropped until there
    is room again.
    """

    def __init__(
        self, directory: Path, actor: str, clock_ns: Callable[[], int], ring: LineRing
    ) -> None:
        super().__init__(directory, actor, clock_ns)
        self._ring = ring
        self._draining = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_draining, name="recovery-events", daemon=True
        )
        self._thread.start()

    def flush(self) -> None:
        """Have every line in the file. Raises LogError."""
        try:
            self._drain(END_LIMIT_S)
        except OSError as error:
            raise LogError(
                f"cannot write event log {self._path}: {error.strerror}", hint="free disk space"
            ) from error

    def abandon(self) -> None:
        """Close the file without an end mark; what the ring holds stays there."""
        self._end_thread()
        super().abandon()

    def close(self) -> None:
        """Write the end mark and everything else, and close the file; later calls do nothing. What
        the disk does not take stays in the ring, for the supervisor.
        """
        if self._closed:
            return
        try:
            if self._dropped is not None:
                with suppress(LogError):  # there may be room by now to tell of it
                    self.flush()
            self.write(Kind.ACTOR_ENDED, **used())
            with suppress(LogError):
                self.flush()
        finally:
            self.abandon()

    def _put(self, line: bytes) -> None:
        dropping = self._dropped is not None
        if not dropping and self._ring.put(line):
            return
        self._drain(0.0 if dropping else PATIENCE_S)
        if dropping and self._ring.used > CAPACITY // 2:  # not again after a line or two
            raise OSError(errno.EAGAIN, "the file does not keep up")
        if self._ring.put(line):
            return
        if len(line) <= CAPACITY:
            raise OSError(errno.EAGAIN, "the file does not keep up")
        super()._put(line)
        self._ring.passed(len(line))

    def _drain(self, limit_s: float) -> None:
        """Move all lines to the file. Raises OSError, also when another thread still does so after
        ``limit_s``.
        """
        if not self._draining.acquire(timeout=limit_s):
            raise OSError(errno.EAGAIN, f"the file takes nothing for {limit_s:g} s")
        try:
            if self._ring.head:
                self._ensure_open()
                self._ring.drain(self._fd)
        finally:
            self._draining.release()

    def _keep_draining(self) -> None:
        while not self._ending.wait(DRAIN_EVERY_S):
            # the lines are kept; events are dropped once the ring is full
            with suppress(OSError, LogError):
                self._drain(END_LIMIT_S)

    def _end_thread(self) -> None:
        self._ending.set()
        if self._thread is not threading.current_thread():
            self._thread.join(END_LIMIT_S)
