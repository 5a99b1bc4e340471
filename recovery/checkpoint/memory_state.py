"""A rank's checkpoints in memory: a copy of its state in a buffer that the node's keeper holds on
to, and back.

Training stands still for the copy alone. Checksums, the look for non-finite values, the keeper and
the copy on another node follow on a thread of its own; the next save waits for them, so that an
older checkpoint is never let go before a newer one is as safe. An interval shorter than that takes
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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recovery.checkpoint.files import pieces
from recovery.checkpoint.files.pieces import CorruptCheckpoint
from recovery.checkpoint.memory.client import KeeperClient
from recovery.checkpoint.memory.files import MemoryFile, create, populate
from recovery.checkpoint.memory.header import (
    Header,
    Key,
    Moment,
    Part,
    complete,
    mismatch,
    name_of,
    shards_at,
    sums_of,
)
from recovery.checkpoint.saves.chunks import Chunk, chunks_of, not_finite
from recovery.checkpoint.saves.reading import planned, refuse_foreign
from recovery.policy.layout import Layout
from recovery.state import strides
from recovery.state.optimizer_state import Slots
from recovery.state.state import TrainState
from recovery.state.strides import Progress, quiet

MAX_BUFFERS = 4  # of which a keeper holds two or three; one more is being written
WAIT_S = 0.05
# the keeper of a lost node has a successor within milliseconds, on a busy machine seconds
CONNECT_S = 5.0
CLOSE_LIMIT_S = 10.0
AT_ONCE = 32 << 20  # bytes from which on several threads are worth their while


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended. ``seconds``: from its begin to the end of everything; ``blocked_s``: of it
    training stood still; ``copies``: other nodes that hold it; ``error``: it was not kept, and why;
    ``alone``: why nobody else has it.
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


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A complete checkpoint that some keepers hold together."""

    moment: Moment
    shards: int

    @property
    def step(self) -> int:
        """The step whose state it is."""
        return self.moment[1]

    @property
    def name(self) -> str:
        """As events call it."""
        return name_of(self.step)


class Memory:
    """Used by the training thread. ``seat``: this process's name; ``check`` raises when waiting
    makes no sense any more; ``progress``: called while something goes on, so that it is not taken
    for a hang.
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
        self._buffers: dict[int, _Buffer] = {}  # those that somebody holds
        self._free: list[_Buffer] = []
        self._shape: list[int] = []  # bytes of the chunks that the buffers are made for
        self._count = 0
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._done: queue.SimpleQueue[Saved] = queue.SimpleQueue()

    def save(self, *, generation: int, layout: Layout, rank: int) -> None:
        """Copy the state of the step just committed and have it kept; ``results`` says how that
        ended.

        Waits for the save before. Raises what ``check`` raises, OSError when there is no memory for
        a buffer.
        """
        self.settle()
        started_s = time.perf_counter()
        tensors = self._state.tensors()
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

    def results(self) -> Iterator[Saved]:
        """Saves that have ended since the last call."""
        while not self._done.empty():
            yield self._done.get_nowait()

    def settle(self, limit_s: float | None = None) -> bool:
        """Wait for the save under way, at most ``limit_s``; whether there is none any more. Raises
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
        """Have all keepers let go of what generations ``before`` this one saved after ``step``:
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
        """Finish what is under way, within CLOSE_LIMIT_S, and let go of all buffers and of the
        keeper.
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
        """One to write into, of this thread until it is offered. Raises OSError."""
        with self._lock:
            if list(shape) != self._shape:
                for buffer in (*self._free, *self._buffers.values()):
                    _release(buffer)
                self._free, self._buffers, self._shape = [], {}, list(shape)
            # a keeper that ended told nobody what it let go
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
        """Check, offer, and note how it ended."""
        error, alone, size = "", "", sum(chunk.bytes for chunk in chunks)
        copies: tuple[int, ...] = ()
        try:
            header = self._header(key, buffer, chunks, scalars)
            kept = self._client.offer(header, buffer.file.fd)
            copies, alone = kept.copies, kept.alone
            self._give_back(kept.released)
        except Exception as failure:  # reported, and never ends training
            error = str(failure) or type(failure).__name__
            self._give_back([buffer.number])
        seconds = time.perf_counter() - started_s
        self._done.put(
            Saved(
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
                Part(
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


class MemoryReading:
    """A restore from memory, in the acts of ``recovery.checkpoint.saves.reading``; nothing live is
    touched before ``load``. Whoever saved may have been another number of ranks.
    """

    def __init__(
        self, client: KeeperClient, candidate: Candidate, *, progress: Callable[[], None]
    ) -> None:
        self.name = candidate.name
        self.scalars: dict[str, Any] = {}
        self.slots: Slots | None = None
        self._client = client
        self._candidate = candidate
        self._progress = progress
        self._shards: list[tuple[Header, MemoryFile]] = []
        self._boxes: list[tuple[Tensor, Tensor]] = []  # (of the memory, of the live state)

    def gather(self, state: TrainState, *, first: int) -> None:
        """Get what this rank needs, beginning with shard ``first``."""
        wanted: list[Chunk] = []
        missing: dict[str, int] = {}
        shards = self._candidate.shards
        for number in range(shards):
            generation, step = self._candidate.moment
            key = Key(
                generation=generation, step=step, shard=(first + number) % shards, shards=shards
            )
            header, file = self._client.fetch(key, connect_s=CONNECT_S, progress=self._progress)
            self._shards.append((header, file))
            if not number:
                self.scalars = header.scalars
                table = {
                    part.name: {"dtype": part.dtype, "shape": list(part.shape)}
                    for part in header.parts
                }
                self.slots = planned(self.name, state, header.scalars, table)
                wanted = chunks_of(state.tensors(self.slots))
                missing = {chunk.name: chunk.data.numel() for chunk in wanted}
                refuse_foreign(self.name, table, wanted)
            self._match(header, file, wanted, missing)
            if not any(missing.values()):
                return
        name = next(name for name, left in missing.items() if left)
        raise CorruptCheckpoint(f"its {shards} shards lack {missing[name]} values of {name}")

    def verify(self) -> None:
        """Compare all bytes with their checksums. Raises CorruptCheckpoint."""
        for header, file in self._shards:
            wrong = _mismatch(header, file.data, self._progress)
            if wrong is not None:
                raise CorruptCheckpoint(f"{header.key.label} in memory is damaged: {wrong}")

    def load(self) -> None:
        """Fill the live tensors; scalars are the caller's to put in."""
        with torch.no_grad():
            for source, live in self._boxes:
                strides.copy(live, source, self._progress)

    def close(self) -> None:
        """Let the memory go."""
        self._boxes = []
        for _, file in self._shards:
            file.close()
        self._shards = []

    def _match(
        self, header: Header, file: MemoryFile, wanted: Sequence[Chunk], missing: dict[str, int]
    ) -> None:
        """Find what of the wanted chunks lies in a shard."""
        whole = torch.frombuffer(file.data, dtype=torch.uint8)
        parts = {part.name: part for part in header.parts}
        for chunk in wanted:
            part = parts.get(chunk.name)
            if part is None or not missing[chunk.name]:
                continue
            box = [
                (max(a, b), min(a + m, b + n))
                for a, m, b, n in zip(chunk.at, chunk.size, part.start, part.sizes, strict=True)
            ]
            if any(low >= high for low, high in box):
                continue
            saved = (
                whole[part.offset : part.offset + part.bytes]
                .view(chunk.data.dtype)
                .reshape(part.sizes)
            )
            source, live = _narrow(saved, box, part.start), _narrow(chunk.data, box, chunk.at)
            missing[chunk.name] -= live.numel()
            self._boxes.append((source, live))


def _mismatch(header: Header, data: memoryview, progress: Callable[[], None]) -> str | None:
    """As ``header.mismatch``, by several threads where that is worth their while."""
    count = pieces.workers()
    if header.bytes < AT_ONCE or count == 1:
        return mismatch(header, data, progress)
    cuts = [len(header.sums) * n // count for n in range(count + 1)]
    with ThreadPoolExecutor(count) as pool:
        found = [
            pool.submit(mismatch, header, data, progress, numbers=range(a, b))
            for a, b in pairwise(cuts)
        ]
    return next((text for text in (future.result() for future in found) if text is not None), None)


def _narrow(tensor: Tensor, box: Sequence[tuple[int, int]], origin: Sequence[int]) -> Tensor:
    for dim, ((low, high), start) in enumerate(zip(box, origin, strict=True)):
        tensor = tensor.narrow(dim, low - start, high - low)
    return tensor


def _as_chunk(view: Tensor, chunk: Chunk) -> Tensor:
    """A buffer's bytes, as the tensor that goes there."""
    return view.view(chunk.data.dtype).reshape(chunk.data.shape)


def _as_flat(view: Tensor, chunk: Chunk) -> Chunk:
    """The same chunk, in the buffer."""
    return replace(chunk, data=_as_chunk(view, chunk))


def _release(buffer: _Buffer) -> None:
    buffer.views = []
    buffer.file.close()
