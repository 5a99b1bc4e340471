"""Saves beside training: training waits only while the state is copied to host memory; a separate
thread writes from there while training goes on.

One save at a time; the memory for the copy is allocated once and reused.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from trainchaos.recovery.checkpoint.chunks import Chunk, await_copies, copy_into
from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.saving import SaveOutcome
from trainchaos.recovery.state import strides
from trainchaos.recovery.state.strides import Progress, quiet

BLOCK_BYTES = 1 << 30  # of memory allocated at once; more only for a larger tensor
LOOK_S = 0.05


class Snapshot:
    """Host memory that holds a copy of chunks: pinned where they come from a GPU, in huge pages
    where available.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def take(self, chunks: Sequence[Chunk], progress: Progress = quiet) -> list[Chunk]:
        """Copies of the chunks, valid until the next call. ``progress``: called every 32 MB."""
        packed = _packed(chunks)
        sizes = [size for _, size in packed]
        if len(sizes) > len(self._blocks) or any(
            size > len(block) for size, block in zip(sizes, self._blocks, strict=False)
        ):
            # The first touch of fresh memory takes several times as long as a copy.
            self._blocks = []  # old memory is released before more is allocated
            pinned = any(chunk.data.is_cuda for chunk in chunks)
            self._blocks = [_memory(size, pinned=pinned, progress=progress) for size in sizes]
        copies = list[Chunk]()
        for block, (offsets, _) in zip(self._blocks, packed, strict=False):
            some = chunks[len(copies) : len(copies) + len(offsets)]
            copies += copy_into(block, some, offsets, progress)
        await_copies(chunks)
        return copies


def _packed(chunks: Sequence[Chunk]) -> list[tuple[list[int], int]]:
    """Chunks laid into blocks, in order: of each block the offsets of its chunks, and its size."""
    groups: list[list[int]] = []
    size = BLOCK_BYTES
    for chunk in chunks:
        if size + chunk.bytes > BLOCK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(chunk.bytes)
        size += chunk.bytes
    return [pieces.cut(group) for group in groups]


def _memory(size: int, *, pinned: bool, progress: Progress) -> Tensor:
    if pinned:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        progress()
        return memory
    mapped = mmap.mmap(-1, max(size, 1))
    with suppress(OSError):  # a kernel without huge pages; small pages work too
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)[:size]
    for (part,) in strides.strides(memory):
        part.zero_()
        progress()
    return memory


class BackgroundWorker:
    """Runs one save at a time on a separate thread. Used by one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._moves = 0

    def moved(self) -> None:
        """The work shows a sign of life; called by any thread."""
        self._moves += 1

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], SaveOutcome]) -> None:
        """Begin; the outcome of earlier work must have been taken."""

        def run() -> None:
            self._outcome = work()

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(
        self, limit_s: float, progress: Progress | None = None, look: Progress = quiet
    ) -> bool:
        """Whether the work has ended, after waiting up to the limit; with ``progress``, the limit
        is the time between signs of life, and it is called with each. ``look``: called while it is
        waited for, and may raise.
        """
        moves, until_s = self._moves, time.monotonic() + limit_s
        while self._thread is not None and self.busy:
            look()
            now_s = time.monotonic()
            if progress is not None and self._moves != moves:
                moves, until_s = self._moves, now_s + limit_s
                progress()
            if now_s >= until_s:
                return False
            self._thread.join(timeout=min(LOOK_S, until_s - now_s))
        return True

    def take(self) -> SaveOutcome | None:
        """How the work ended: once, and None before it has."""
        if self._thread is None or self.busy:
            return None
        self._thread, outcome, self._outcome = None, self._outcome, None
        return outcome
