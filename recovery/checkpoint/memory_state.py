"""A rank's checkpoints in memory: a copy of its state in a buffer that the node's keeper holds as
well. ``memory_reading`` restores from them.

Training stands still only for the copy. Checksums, the check for non-finite values, the keeper and
the copy on another node follow on a separate thread; the next save waits for them, so that an older
checkpoint is never released before a newer one is as safe. An interval shorter than that takes
slows training down: choose a longer one.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.memory.client import KeeperClient
from trainchaos.recovery.checkpoint.memory.files import MemoryFile, create, populate
from trainchaos.recovery.checkpoint.memory.header import (
    Header,
    Key,
    TensorPart,
    complete,
    shards_at,
    sums_of,
)
from trainchaos.recovery.checkpoint.memory_reading import CONNECT_S, Candidate, MemoryReading
from trainchaos.recovery.checkpoint.saves.chunks import Chunk, chunks_of, not_finite
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state import strides
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import Progress, quiet

MAX_BUFFERS = 4  # of which a keeper holds two or three; one more is being written
WAIT_S = 0.05
CLOSE_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class MemorySave:
    """How a save ended. ``seconds``: from its begin to the end of everything; ``blocked_s``: the
    part of it in which training stood still; ``copies``: other nodes that hold it; ``error``: why
    it was not kept; ``alone``: why no other node holds it.
    """

    step: int
    generation: int
    bytes: int
    seconds: float
    blocked_s: float
    copies: tuple[int, ...] = ()
    error: str = ""
    alone: str = ""


@dataclass(kw_only=True)
class _Buffer:
    number: int
    file: MemoryFile
    views: list[Tensor]  # flat bytes, one for each chunk


class MemoryState:
    """Used by the training thread. ``seat``: this process's name; ``check`` raises when waiting has
    become pointless; ``progress``: called while work goes on, so that it is not taken for a hang.
    """

    def __init__(
        self,
        state: TrainState,
        client: KeeperClient,
        *,
        job: str,
        seat: str,
        check: Callable[[], None],
        progress: Callable[[], None],
    ) -> None:
        self._state = state
        self._client = client
        self._job = job
        self._seat = seat
        self._check = check
        self._progress = progress
        self._buffers: dict[int, _Buffer] = {}  # those that the keeper or a reader holds
        self._free: list[_Buffer] = []
        self._shape: list[int] = []  # bytes of the chunks that the buffers are made for
        self._count = 0
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._done: queue.SimpleQueue[MemorySave] = queue.SimpleQueue()

    def save(self, *, generation: int, layout: Layout, rank: int) -> None:
        """Copy the state of the step just committed and have it kept; ``results`` reports the
        outcome.

        Waits for the save before. Raises what ``check`` raises, OSError when there is no memory for
        a buffer.
        """
        self.settle()
        started_s = time.perf_counter()
        tensors = self._state.saved()
        chunks = chunks_of(tensors, self._state.learned(tensors))
        buffer = self._buffer([chunk.bytes for chunk in chunks])
        with torch.no_grad():
            for view, chunk in zip(buffer.views, chunks, strict=True):
                strides.copy(_as_chunk(view, chunk), chunk.data, self._progress)
        key = Key(
            generation=generation,
            step=self._state.step,
            shard=layout.shard_of(rank),
            shards=layout.shards,
        )
        scalars = self._state.scalars()
        blocked_s = time.perf_counter() - started_s
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._pending = self._worker.submit(
            self._keep, key, buffer, chunks, scalars, started_s, blocked_s
        )

    def results(self) -> Iterator[MemorySave]:
        """Saves that have ended since the last call."""
        while not self._done.empty():
            yield self._done.get_nowait()

    def settle(self, limit_s: float | None = None) -> bool:
        """Wait for the save under way, at most ``limit_s``; returns whether it has ended. Raises
        what ``check`` raises.
        """
        pending, deadline_s = (
            self._pending,
            math.inf if limit_s is None else time.monotonic() + limit_s,
        )
        while pending is not None and not pending.done():
            if time.monotonic() > deadline_s:
                return False
            self._check()
            self._progress()
            try:
                pending.exception(timeout=WAIT_S)
            except TimeoutError:
                continue
        self._pending = None
        return True

    def candidates(self) -> list[Candidate]:
        """Complete checkpoints, newest first. Raises KeeperError when the node's keeper cannot be
        asked.
        """
        listing = self._client.listing(connect_s=CONNECT_S)
        keys = [key for held in listing.nodes.values() for key in held]
        moments = reversed(complete(keys))
        return [Candidate(moment=moment, shards=shards_at(keys, moment)) for moment in moments]

    def forget(self, step: int, before: int) -> list[int]:
        """Have all keepers release what generations before ``before`` saved after ``step``; returns
        those steps.

        Raises KeeperError.
        """
        return sorted({key.step for key in self._client.forget(step, before, connect_s=CONNECT_S)})

    @contextmanager
    def reading(self, candidate: Candidate, layout: Layout, rank: int) -> Iterator[MemoryReading]:
        """This rank's part of a checkpoint. Raises KeeperError, CorruptCheckpoint,
        CheckpointMismatch.
        """
        reading = MemoryReading(self._client, candidate, progress=self._progress)
        try:
            first = layout.shard_of(rank) if candidate.shards == layout.shards else 0
            reading.gather(self._state, first=first)
            yield reading
        finally:
            reading.close()

    def close(self) -> None:
        """Finish what is under way, within CLOSE_LIMIT_S, and release all buffers and the
        connection to the keeper.
        """
        self.settle(CLOSE_LIMIT_S)
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        with self._lock:
            for buffer in (*self._free, *self._buffers.values()):
                _release(buffer)
            self._free, self._buffers = [], {}

    # ---- buffers

    def _buffer(self, shape: Sequence[int]) -> _Buffer:
        """A buffer to write into, owned by this thread until it is offered. Raises OSError."""
        with self._lock:
            if list(shape) != self._shape:
                for buffer in (*self._free, *self._buffers.values()):
                    _release(buffer)
                self._free, self._buffers, self._shape = [], {}, list(shape)
            # a keeper that has ended released its buffers without a message
            while len(self._buffers) >= MAX_BUFFERS:
                _release(self._buffers.pop(min(self._buffers)))
            buffer = self._free.pop() if self._free else self._make(self._progress)
            self._buffers[buffer.number] = buffer
            return buffer

    def _make(self, progress: Progress) -> _Buffer:
        offsets, end = pieces.cut(self._shape)
        file = create(end, name=self._seat)
        populate(file, progress)
        whole = torch.frombuffer(file.data, dtype=torch.uint8)
        views = [whole[at : at + size] for at, size in zip(offsets, self._shape, strict=True)]
        self._count += 1
        return _Buffer(number=self._count, file=file, views=views)

    # ---- the other thread

    def _keep(
        self,
        key: Key,
        buffer: _Buffer,
        chunks: Sequence[Chunk],
        scalars: dict[str, Any],
        started_s: float,
        blocked_s: float,
    ) -> None:
        """Check the copy, offer it, and note the outcome."""
        error, alone, size = "", "", sum(chunk.bytes for chunk in chunks)
        copies: tuple[int, ...] = ()
        try:
            header = self._header(key, buffer, chunks, scalars)
            kept = self._client.offer(header, buffer.file.fd)
            copies, alone = kept.copies, kept.alone
            self._give_back(kept.released)
        except Exception as failure:  # reported; never ends training
            error = str(failure) or type(failure).__name__
            self._give_back([buffer.number])
        seconds = time.perf_counter() - started_s
        self._done.put(
            MemorySave(
                step=key.step,
                generation=key.generation,
                bytes=size,
                seconds=seconds,
                blocked_s=blocked_s,
                copies=copies,
                error=error,
                alone=alone,
            )
        )
        with self._lock:
            if not self._free and len(self._buffers) < MAX_BUFFERS and not error:
                # so that the next save need not wait for fresh memory
                self._free.append(self._make(quiet))

    def _header(
        self, key: Key, buffer: _Buffer, chunks: Sequence[Chunk], scalars: dict[str, Any]
    ) -> Header:
        offsets, end = pieces.cut([chunk.bytes for chunk in chunks])
        parts = []
        for chunk, view, offset in zip(chunks, buffer.views, offsets, strict=True):
            if not_finite(_as_flat(view, chunk)):
                raise RuntimeError(f"the state is not finite ({chunk.name}), so it is not saved")
            parts.append(
                TensorPart(
                    name=chunk.name,
                    dtype=chunk.dtype,
                    shape=chunk.shape,
                    start=chunk.at,
                    sizes=chunk.size,
                    offset=offset,
                    bytes=chunk.bytes,
                )
            )
        return Header(
            job=self._job,
            key=key,
            bytes=end,
            sums=sums_of(buffer.file.data[:end]),
            parts=tuple(parts),
            scalars=scalars,
            seat=self._seat,
            buffer=buffer.number,
        )

    def _give_back(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                buffer = self._buffers.pop(number, None)
                if buffer is not None:
                    self._free.append(buffer)


def _as_chunk(view: Tensor, chunk: Chunk) -> Tensor:
    """A buffer's bytes as the tensor stored there."""
    return view.view(chunk.data.dtype).reshape(chunk.data.shape)


def _as_flat(view: Tensor, chunk: Chunk) -> Chunk:
    """The same chunk, in the buffer."""
    return replace(chunk, data=_as_chunk(view, chunk))


def _release(buffer: _Buffer) -> None:
    buffer.views = []
    buffer.file.close()
