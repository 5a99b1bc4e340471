"""Restores a rank's state from checkpoints that keepers hold in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint
from trainchaos.recovery.checkpoint.memory.client import KeeperClient
from trainchaos.recovery.checkpoint.memory.files import MemoryFile
from trainchaos.recovery.checkpoint.memory.header import Header, Key, Moment, mismatch, name_of
from trainchaos.recovery.checkpoint.saves.chunks import Chunk, chunks_of
from trainchaos.recovery.checkpoint.saves.reading import planned, refuse_foreign
from trainchaos.recovery.state import strides
from trainchaos.recovery.state.optimizer_state import Slots
from trainchaos.recovery.state.state import TrainState

# the keeper of a lost node is replaced within milliseconds, on a busy machine within seconds
CONNECT_S = 5.0
AT_ONCE = 32 << 20  # size in bytes from which several threads are faster


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
        """Its name in events."""
        return name_of(self.step)


class MemoryReading:
    """A restore from memory, in the steps of ``recovery.checkpoint.saves.reading``; live state is
    untouched until ``load``. The number of ranks may differ from the number that saved.
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
        """Get the shards that this rank needs, beginning with shard ``first``."""
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
                wanted = chunks_of(state.saved(self.slots))
                missing = {chunk.name: chunk.data.numel() for chunk in wanted}
                refuse_foreign(self.name, table, wanted, partial=state.partial)
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
        """Fill the live tensors; the caller restores the scalars."""
        with torch.no_grad():
            for source, live in self._boxes:
                strides.copy(live, source, self._progress)

    def close(self) -> None:
        """Release the memory."""
        self._boxes = []
        for _, file in self._shards:
            file.close()
        self._shards = []

    def _match(
        self, header: Header, file: MemoryFile, wanted: Sequence[Chunk], missing: dict[str, int]
    ) -> None:
        """Find the parts of the wanted chunks that lie in a shard."""
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
    """As ``header.mismatch``, on several threads where that is faster."""
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
