"""Asynchronous saves: the state is copied to host memory, which is all that training waits for, and written from there
by a thread of its own while training goes on.

One save at a time; the memory for the copy is taken once and used again.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recovery import pieces
from recovery.mechanisms.saving.chunks import Chunk
from recovery.saving import Outcome


class Snapshot:
    """Host memory that holds a copy of chunks: pinned where they come from a GPU, in huge pages where there are any."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Get the memory now. The first touch of fresh memory takes several times as long as a copy."""
        _, end = pieces.cut([chunk.bytes for chunk in chunks])
        if self._memory is None or len(self._memory) < end:
            self._memory = _memory(end, pinned=any(chunk.data.is_cuda for chunk in chunks))

    def take(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Copies of them, which are good until the next call."""
        self.prepare(chunks)
        memory = self._memory
        assert memory is not None
        offsets, _ = pieces.cut([chunk.bytes for chunk in chunks])
        copies = []
        for chunk, offset in zip(chunks, offsets, strict=True):
            into = memory[offset : offset + chunk.bytes].view(chunk.data.dtype).view(chunk.data.shape)
            into.copy_(chunk.data, non_blocking=True)
            copies.append(replace(chunk, data=into))
        for device in {chunk.data.device for chunk in chunks if chunk.data.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _memory(size: int, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    mapped = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them; small pages do too
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size].zero_()


class Background:
    """Does one piece of work at a time on a thread of its own. Used by one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], Outcome]) -> None:
        """Begin; the outcome of the work before must have been taken."""

        def run() -> None:
            self._outcome = work()

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after waiting so long for it."""
        if self._thread is not None:
            self._thread.join(timeout=timeout_s)
        return not self.busy

    def take(self) -> Outcome | None:
        """How the work ended: once, and None before it has."""
        if self._thread is None or self.busy:
            return None
        self._thread, outcome, self._outcome = None, self._outcome, None
        return outcome
