"""A rank's checkpoints in memory: a copy of its state in a buffer that the node's keeper holds as
well. Every rank of the first replica saves its part; with one shard that is rank 0, since all hold
the same.

Training stands still only for the copy. Checksums, the check for non-finite values, the keeper and
the copy on another node follow on a separate thread; the next save waits for them, so that an older
checkpoint is never released before a newer one is as safe. An interval shorter than that takes
slows training down: choose a longer one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.background import BackgroundWorker
from trainchaos.recovery.checkpoint.chunks import (
    Chunk,
    await_copies,
    chunks_of,
    copy_into,
    described,
    first_not_finite,
    placed,
)
from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.checkpoints import CorruptCheckpoint, first_line
from trainchaos.recovery.checkpoint.files.saving import RankHooks, SaveOutcome, Saving
from trainchaos.recovery.checkpoint.memory.client import KeeperClient, KeeperError
from trainchaos.recovery.checkpoint.memory.header import (
    Header,
    Key,
    MemoryFile,
    complete,
    create,
    name_of,
    shards_at,
    view,
)
from trainchaos.recovery.checkpoint.restore import Candidate, ChunkRestore, reading_of
from trainchaos.recovery.checkpoint.saves import CheckpointPart
from trainchaos.recovery.policy.interval import SaveSchedule
from trainchaos.recovery.policy.jobconfig import InMemory
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import quiet
from trainchaos.recovery.transport.wire import CheckpointNote

PLACE = "memory"
SETTLE_S = 10.0  # longest wait, before a restore or the end, for a save that is under way
# the keeper of a lost node is replaced within milliseconds, on a busy machine within seconds
CONNECT_S = 5.0
MAX_BUFFERS = 4  # of which a keeper holds two or three; one more is being written


@dataclass(kw_only=True)
class _Buffer:
    number: int
    file: MemoryFile
    memory: Tensor  # its bytes

    def release(self) -> None:
        self.memory = torch.empty(0)
        self.file.close()


class MemoryCheckpointer:
    """Used by the training thread. ``seat``: this process's name; ``timetable``: learns how long
    saves hold training up.
    """

    def __init__(
        self,
        config: InMemory,
        state: TrainState,
        hooks: RankHooks,
        *,
        seat: str,
        timetable: SaveSchedule,
    ) -> None:
        self._job = config.job
        self._state = state
        self._hooks = hooks
        self._seat = seat
        self._timetable = timetable
        self._client = KeeperClient(config.socket, check=hooks.check)
        self._saving = Saving(
            write=hooks.write, send=self._note, clock_s=time.perf_counter, name_of=name_of
        )
        self._said = ""  # the last error, which is not shown to people repeatedly
        self._worker = BackgroundWorker()
        self._generation = 0  # of the save under way
        self._buffers: dict[int, _Buffer] = {}  # those that the keeper or a reader holds
        self._free: list[_Buffer] = []
        self._size = 0  # bytes of a buffer
        self._count = 0
        self._lock = threading.Lock()

    # ---- saves

    def after_commit(
        self, step: int, *, rank: int, layout: Layout, generation: int, asked: bool
    ) -> None:
        """Save if ``asked`` for; waits for the save before, and for the copy. The outcome of
        earlier saves is reported here too. A failed save is reported and never ends training.
        Raises what ``check`` raises.
        """
        self._report(generation)
        if not asked or layout.replica_of(rank):
            return
        began_s = self._hooks.clock_s()
        shard, shards = layout.shard_of(rank), layout.shards
        part: dict[str, Any] = {"place": PLACE, "shard": shard, "shards": shards}
        self._hooks.saves()
        self._saving.begin(step, **part)
        self.settle()
        self._report(generation)
        self._begin(Key(generation=generation, step=step, shard=shard, shards=shards), part)
        self._timetable.saved(began_s, self._hooks.clock_s() - began_s)

    def _begin(self, key: Key, part: dict[str, Any]) -> None:
        """Copy the state of the step just committed, and have it kept by another thread."""
        began_s = time.perf_counter()
        tensors = self._state.saved()
        chunks = chunks_of(tensors, self._state.learned(tensors))
        offsets, size = pieces.cut([chunk.bytes for chunk in chunks])
        try:
            buffer = self._buffer(size)
        except OSError as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            self._saving.report(SaveOutcome(step=key.step, error=why, more=part))
            return
        with torch.no_grad():
            copies = copy_into(buffer.memory, chunks, offsets, self._hooks.progress)
            await_copies(chunks)
        scalars = self._state.scalars()
        blocked_s = time.perf_counter() - began_s
        self._generation = key.generation

        def keep() -> SaveOutcome:
            outcome = self._keep(key, buffer, copies, offsets, scalars, began_s)
            return replace(outcome, blocked_s=blocked_s, more={**part, **outcome.more})

        self._worker.start(keep)

    def _keep(
        self,
        key: Key,
        buffer: _Buffer,
        chunks: Sequence[Chunk],
        offsets: Sequence[int],
        scalars: dict[str, Any],
        began_s: float,
    ) -> SaveOutcome:
        """On the other thread: check the copy, and offer it."""
        try:
            bad = first_not_finite(chunks)
            if bad is not None:
                raise RuntimeError(f"the state is not finite ({bad}), so it is not saved")
            data = buffer.file.data[: self._size]
            header = Header(
                job=self._job,
                key=key,
                bytes=len(data),
                pieces=tuple(pieces.of_memory(data)),
                tensors=placed(chunks, offsets, described(chunks)),
                scalars=scalars,
                seat=self._seat,
                buffer=buffer.number,
            )
            kept = self._client.offer(header, buffer.file.fd)
        except Exception as failure:  # reported; never ends training
            self._give_back([buffer.number])
            return SaveOutcome(step=key.step, error=str(failure) or type(failure).__name__)
        seconds = time.perf_counter() - began_s
        more = {"copies": list(kept.copies), **({"alone": kept.alone} if kept.alone else {})}
        with self._lock:
            self._take_back(kept.released)
            if not self._free and len(self._buffers) < MAX_BUFFERS:
                with suppress(OSError):  # so that the next save need not wait for fresh memory
                    self._free.append(self._make(quiet))
        size = sum(chunk.bytes for chunk in chunks)
        return SaveOutcome(step=key.step, bytes=size, seconds=seconds, more=more)

    def settle(self, limit_s: float = math.inf) -> bool:
        """Wait for the save under way; returns whether it has ended. Raises what ``check``
        raises.
        """

        def look() -> None:
            self._hooks.check()
            self._hooks.progress()

        return self._worker.wait(limit_s, look=look)

    def _report(self, generation: int) -> None:
        outcome = self._worker.take()
        # One of a past generation may exist or not: it is not relied on.
        if outcome is not None and self._generation == generation:
            self._saving.report(outcome)

    def _note(self, note: CheckpointNote) -> None:
        """People hear of a failure, once; the supervisor counts on none of these checkpoints."""
        if note.state == "saving":
            return
        said, self._said = self._said, note.error[:40]
        if self._said not in ("", said):
            self._hooks.send(note)

    # ---- restores

    def candidates(self) -> list[Candidate]:
        """Complete checkpoints, newest first."""
        try:
            listing = self._client.listing(connect_s=CONNECT_S)
        except KeeperError as error:
            self.refused(Candidate(step=0, shards=1), first_line(error), name=PLACE)
            return []
        keys = [key for held in listing.nodes.values() for key in held]
        return [
            Candidate(step=moment[1], generation=moment[0], shards=shards_at(keys, moment))
            for moment in reversed(complete(keys))
        ]

    def refused(self, candidate: Candidate, reason: str, *, name: str = "") -> None:
        """Report one that could not be used."""
        self._hooks.write(
            Kind.CHECKPOINT_REFUSED,
            step=candidate.step,
            checkpoint=name or candidate.name,
            reason=reason,
            place=PLACE,
        )

    @contextmanager
    def reading(self, candidate: Candidate, layout: Layout, rank: int) -> Iterator[ChunkRestore]:
        """This rank's part of a checkpoint: its own shard, or of as many as were saved by another
        number of ranks all that it takes. Raises CorruptCheckpoint, CheckpointMismatch.
        """
        shard, shards = layout.shard_of(rank), candidate.shards
        wanted = [shard] if shards == layout.shards else range(shards)
        headers, parts, data = list[Header](), list[CheckpointPart](), dict[str, memoryview]()
        with ExitStack() as stack:
            try:
                for number in wanted:
                    key = Key(
                        generation=candidate.generation,
                        step=candidate.step,
                        shard=number,
                        shards=shards,
                    )
                    header, fd = self._client.fetch(
                        key, connect_s=CONNECT_S, progress=self._hooks.progress
                    )
                    file = stack.enter_context(closing(view(fd, self._hooks.progress)))
                    part = CheckpointPart(
                        file=f"{key.label} in memory",
                        pieces=list(header.pieces),
                        tensors=header.tensors,
                    )
                    headers.append(header)
                    parts.append(part)
                    data[part.file] = file.data
            except KeeperError as error:
                raise CorruptCheckpoint(first_line(error)) from error
            files = {part.file: {"pieces": part.pieces} for part in parts}
            scalars, tensors = headers[0].scalars, saves.joined(parts)
            manifest = {"files": files, "scalars": scalars, "tensors": tensors}
            yield reading_of(
                self._state,
                candidate.name,
                manifest,
                lambda name: lambda where: data[name],
                self._hooks.progress,
            )

    def distrust(self, step: int, before: int) -> bool:
        """Have the keepers release what generations before ``before`` saved after ``step``; returns
        whether they have.
        """
        try:
            gone = self._client.forget(step, before, connect_s=CONNECT_S)
        except KeeperError as error:
            self._hooks.write(
                Kind.CHECKPOINT_KEPT, checkpoint=PLACE, error=first_line(error), place=PLACE
            )
            return False
        for released in sorted({key.step for key in gone}):
            self._hooks.write(
                Kind.CHECKPOINT_DELETED, step=released, checkpoint=name_of(released), place=PLACE
            )
        return True

    def close(self) -> None:
        """Finish what is under way, within SETTLE_S, and release all buffers and the connection to
        the keeper.
        """
        self.settle(SETTLE_S)
        self._client.close()
        with self._lock:
            self._release_all()

    # ---- buffers

    def _buffer(self, size: int) -> _Buffer:
        """A buffer to write into, owned by this thread until it is offered. Raises OSError."""
        with self._lock:
            if size != self._size:
                self._release_all()
                self._size = size
            # a keeper that has ended released its buffers without a message
            while len(self._buffers) >= MAX_BUFFERS:
                self._buffers.pop(min(self._buffers)).release()
            buffer = self._free.pop() if self._free else self._make(self._hooks.progress)
            self._buffers[buffer.number] = buffer
            return buffer

    def _make(self, progress: Callable[[], None]) -> _Buffer:
        file = create(self._size, name=self._seat, progress=progress)
        self._count += 1
        memory = torch.frombuffer(file.data, dtype=torch.uint8)
        return _Buffer(number=self._count, file=file, memory=memory)

    def _give_back(self, numbers: Sequence[int]) -> None:
        with self._lock:
            self._take_back(numbers)

    def _take_back(self, numbers: Sequence[int]) -> None:
        found = (self._buffers.pop(number, None) for number in numbers)
        self._free += [buffer for buffer in found if buffer is not None]

    def _release_all(self) -> None:
        for buffer in (*self._free, *self._buffers.values()):
            buffer.release()
        self._free, self._buffers = [], {}
