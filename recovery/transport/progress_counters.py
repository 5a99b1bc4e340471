"""Progress marks: a few words of memory shared by one rank and its supervisor.

A rank stores and the supervisor reads, without a system call, lock or message on the training path.
Every field is one aligned 8-byte word, so a reader never sees half a value; fields of one mark may
be one store apart.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainchaos.recovery.transport import event_ring, exit_hint
from trainchaos.recovery.transport.event_ring import LineRing
from trainchaos.recovery.transport.exit_hint import Bell

PHASES = (
    "idle",
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint",
    "joining",
    "between",
)
_GENERATION, _STEP, _PHASE, _COLLECTIVE, _TIME, _COMMITTED, _LAST_SEQ, _BUSY = range(8)
SIZE = mmap.ALLOCATIONGRANULARITY


class Mark(NamedTuple):
    """One reading; a tuple, as one of each of many thousand ranks is made anew with each report.

    ``step``: being computed; ``collective``: number of collectives entered in this generation;
    ``time_ns``: monotonic time of the last change; ``last_seq``: last event written (-1: none);
    ``busy_s``: it says that it is busy with something else, for so many seconds at most (0: it does
    not).
    """

    generation: int
    step: int
    phase: str
    collective: int
    time_ns: int
    committed: int
    last_seq: int
    busy_s: int = 0


NEVER = Mark(
    generation=0, step=0, phase=PHASES[0], collective=0, time_ns=0, committed=0, last_seq=-1
)
"""Of a process that has noted nothing."""


def create(path: Path | None = None) -> int:
    """A new zeroed mark, and behind it a ring of event lines (``ring_of``) and a ``bell_of`` the
    rank; returns a file descriptor to pass to the rank. ``path``: a file for this memory, readable
    after every process with a descriptor has exited; None: it has no name. Raises OSError.
    """
    if path is None:
        fd = os.memfd_create("progress-mark", os.MFD_CLOEXEC)
    else:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, SIZE + event_ring.SIZE + exit_hint.SIZE)
    return fd


def ring_of(fd: int) -> LineRing:
    """The ring behind a descriptor from ``create``."""
    return LineRing(fd, SIZE)


def bell_of(fd: int) -> Bell:
    """The bell behind it."""
    return Bell(fd, SIZE + event_ring.SIZE)


class MarkPage:
    """The page behind a descriptor from ``create``; used by the rank to write and by the supervisor
    to read.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._begin(self._map, time.monotonic_ns)

    def _begin(self, memory: mmap.mmap | bytearray, now_ns: Callable[[], int]) -> None:
        self._words = self._shared = memoryview(memory).cast("q")
        self._hidden, self._now_ns = False, now_ns

    def read(self) -> Mark:
        words = self._words
        return Mark(
            generation=words[_GENERATION],
            step=words[_STEP],
            phase=PHASES[words[_PHASE]],
            collective=words[_COLLECTIVE],
            time_ns=words[_TIME],
            committed=words[_COMMITTED],
            last_seq=words[_LAST_SEQ] - 1,
            busy_s=words[_BUSY],
        )

    def enter(self, phase: int) -> None:
        """Note a phase (index into PHASES) and the time."""
        self._words[_PHASE] = phase
        self._words[_TIME] = self._now_ns()

    def begin(self, generation: int, step: int) -> None:
        """Note which step of which generation is being computed."""
        self._words[_GENERATION] = generation
        self._words[_STEP] = step

    def collective(self, number: int) -> None:
        """Note that the rank is about to enter its ``number``-th collective of the generation."""
        self._words[_COLLECTIVE] = number
        self._words[_TIME] = self._now_ns()

    def touch(self) -> None:
        """Note that work goes on within the phase."""
        self._words[_TIME] = self._now_ns()

    def busy(self, seconds: int) -> None:
        """Note that the rank is busy with something else, for so long at most; 0: not any more."""
        self._words[_BUSY] = seconds
        self._words[_TIME] = self._now_ns()

    def commit(self, step: int) -> None:
        self._words[_COMMITTED] = step

    def wrote(self, seq: int) -> None:
        """Note the sequence number of the last event written, so that a lost tail of the
        log shows.
        """
        self._words[_LAST_SEQ] = seq + 1

    def hide(self) -> None:
        """Note in private memory from now on, so that the supervisor sees nothing new: for fault
        injection.
        """
        if not self._hidden:
            self._hidden, self._words = True, memoryview(bytearray(self._shared)).cast("q")

    def show(self) -> None:
        """Undo ``hide``, with what was noted meanwhile."""
        if self._hidden:
            self._shared[:] = self._words
            self._hidden, self._words = False, self._shared

    def close(self) -> None:
        self._words.release()
        self._shared.release()
        self._map.close()


IDLE, DATA, FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER, CHECKPOINT, JOINING, BETWEEN = range(
    len(PHASES)
)
