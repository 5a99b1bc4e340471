"""Verified restore, from disk or memory: live state is untouched until everything that is wanted
has been read and checked.

A fresh process holds initial values that nothing else could bring back, and a checkpoint may turn
out bad at its last byte. So all wanted pieces are read twice: first to check them, then, from the
page cache, into the tensors, checked again. That takes less time than it seems (the first pass is
as fast as the disk) and no memory of its own.

Wanted ranges are boxes of global tensors, and so are saved chunks: what four ranks saved can be
loaded by one, two or eight. All ranks that hold a state together load the same checkpoint, or none
loads one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainchaos.chaos.errors import ChaosError
from trainchaos.recovery.checkpoint.chunks import OWN, Chunk, chunks_of, flat
from trainchaos.recovery.checkpoint.files import checkpoints, pieces
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint, CorruptCheckpoint
from trainchaos.recovery.checkpoint.files.pieces import Piece
from trainchaos.recovery.checkpoint.memory import header
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state import strides
from trainchaos.recovery.state.digest import own_memory
from trainchaos.recovery.state.optimizer_state import Slots
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import Progress, quiet

NAMED = 3  # differences that an error names
SMALL_BYTES = 64 << 10  # for smaller copies the call takes longer than the copy
_GOOD, _CORRUPT, _MISMATCH, _HALF = range(4)


class CheckpointMismatch(ChaosError):
    """A good checkpoint, but of another model, optimizer, seed or type; nothing was loaded."""


class HalfLoaded(ChaosError):
    """Data changed between being checked and being loaded: the state holds some of it, and must not
    be used.
    """


# ---- one reading


@dataclass(kw_only=True)
class _Stream:
    """The wanted parts of one file. ``wanted``: (start, target), the target being flat bytes from
    that place on.
    """

    pieces: list[Piece]
    starts: list[int]
    wanted: list[tuple[int, Tensor]] = field(default_factory=list)

    @cached_property
    def targets(self) -> dict[int, list[tuple[Tensor, int, int]]]:
        """Number of a piece -> what it fills: (target, start in the piece, bytes). Call it when all
        wanted parts are known.
        """
        found: dict[int, list[tuple[Tensor, int, int]]] = {}
        for start, target in self.wanted:
            length, done = target.numel(), 0
            number = bisect.bisect_right(self.starts, start) - 1
            while done < length:
                inside = start + done - self.starts[number]
                size = min(length - done, self.pieces[number].size - inside)
                into = target if size == length else target[done : done + size]
                found.setdefault(number, []).append((into, inside, size))
                done, number = done + size, number + 1
        return found


class ChunkRestore:
    """The restore of some chunks from one checkpoint, in three steps: construction (compares names,
    types and shapes), ``verify``, ``load``. ``sources``: of a file, see
    ``recovery.checkpoint.files.pieces.check``; ``partial``: see ``refuse_foreign``; ``progress``:
    called meanwhile. Raises CorruptCheckpoint and CheckpointMismatch.
    """

    def __init__(
        self,
        name: str,
        manifest: Mapping[str, Any],
        sources: Callable[[str], Callable[[str], pieces.Source]],
        wanted: Sequence[Chunk],
        *,
        slots: Slots | None = None,
        partial: bool = False,
        progress: Progress = quiet,
    ) -> None:
        self.name = name
        self.scalars: dict[str, Any] = manifest["scalars"]
        self.slots = slots
        self._sources = sources
        self._progress = progress
        self._streams: dict[str, _Stream] = {}
        self._boxes: list[tuple[Tensor, Tensor]] = []  # (a box of a copy, the live box it goes to)
        tensors = table_of(manifest)
        refuse_foreign(name, tensors, wanted, partial=partial)
        for file in manifest["files"]:
            stream = checkpoints.stream_of(manifest, file)
            ends = list(itertools.accumulate((piece.size for piece in stream), initial=0))
            self._streams[file] = _Stream(pieces=stream, starts=ends[:-1])
        for chunk in wanted:
            self._want(chunk, tensors[chunk.name]["chunks"])

    def verify(self) -> None:
        """Check every piece that holds a wanted part. Raises CorruptCheckpoint."""
        for name, stream in self._streams.items():
            self._check(name, stream, sorted(stream.targets))

    def load(self) -> None:
        """Fill the wanted chunks. Raises HalfLoaded."""
        try:
            for name, stream in self._streams.items():
                numbers = sorted(stream.targets)
                self._check(name, stream, numbers, partial(_fill, stream, numbers))
        except CorruptCheckpoint as error:
            raise HalfLoaded(
                f"{self.name} changed while it was read: {error}",
                hint="start this process anew",
            ) from error
        with torch.no_grad():
            for copy, live in self._boxes:
                strides.copy(live, copy, self._progress)

    def _check(
        self, name: str, stream: _Stream, numbers: Sequence[int], use: pieces.Use | None = None
    ) -> None:
        chosen = [stream.pieces[number] for number in numbers]
        pieces.check(chosen, name, self._sources(name), use, progress=self._progress)

    def _want(self, chunk: Chunk, saved: Sequence[Mapping[str, Any]]) -> None:
        """Find the parts of a chunk. Raises CorruptCheckpoint when a part is missing."""
        live, found = flat(chunk.data), 0
        for source in saved:
            box = _overlap(source["at"], source["size"], chunk.at, chunk.size)
            if box is not None:
                found += math.prod(box[1])
                self._take(chunk, live, source, *box)
        if found != chunk.data.numel():
            raise CorruptCheckpoint(
                f"the manifest has {found} of {chunk.data.numel()} values of {chunk.name}"
            )

    def _take(
        self,
        chunk: Chunk,
        live: Tensor | None,
        source: Mapping[str, Any],
        first: Sequence[int],
        size: Sequence[int],
    ) -> None:
        """``first``, ``size``: of the box that lies in both, the saved chunk and the live one."""
        stream = self._streams.get(source["file"])
        if stream is None:
            raise CorruptCheckpoint(f"the manifest has no file {source['file']!r}")
        there = [low - at for low, at in zip(first, source["at"], strict=True)]
        here = [low - at for low, at in zip(first, chunk.at, strict=True)]
        if live is not None and [*size[1:]] == [*source["size"][1:]] == [*chunk.size[1:]]:
            row = math.prod(size[1:]) * chunk.data.element_size()
            skipped, start, rows = (there[0], here[0], size[0]) if size else (0, 0, 1)
            part = live[start * row : (start + rows) * row]
            stream.wanted.append((source["offset"] + skipped * row, part))
            return
        # of all of the saved chunk, on the host
        copy = torch.empty(source["size"], dtype=chunk.data.dtype)
        bytes_ = flat(copy)
        assert bytes_ is not None
        stream.wanted.append((source["offset"], bytes_))
        self._boxes.append((_narrow(copy, there, size), _narrow(chunk.data, here, size)))


def _fill(stream: _Stream, numbers: Sequence[int], index: int, data: memoryview) -> None:
    source = torch.frombuffer(data, dtype=torch.uint8)
    for into, start, size in stream.targets[numbers[index]]:
        own = own_memory(into) if size <= SMALL_BYTES else None
        if own is not None:
            own[:] = data[start : start + size]
        else:
            into.copy_(source[start : start + size])


def _overlap(
    at: Sequence[int], size: Sequence[int], other: Sequence[int], other_size: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Where the box that lies in both of two boxes begins, and its size; None: there is none."""
    begins, sizes = [], []
    for a, m, b, n in zip(at, size, other, other_size, strict=True):
        low, high = max(a, b), min(a + m, b + n)
        if low >= high:
            return None
        begins.append(low)
        sizes.append(high - low)
    return begins, sizes


def _narrow(tensor: Tensor, at: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(at, size, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def table_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Type, shape and places of each tensor. Raises CorruptCheckpoint."""
    try:
        return dict(manifest["tensors"])
    except (KeyError, TypeError, ValueError):
        raise CorruptCheckpoint("the manifest lists no tensors") from None


# ---- the state of a process


def reading_of(
    state: TrainState,
    name: str,
    manifest: Mapping[str, Any],
    sources: Callable[[str], Callable[[str], pieces.Source]],
    progress: Progress = quiet,
) -> ChunkRestore:
    """The part of the state that this process holds, ready to be read from a checkpoint that fits
    it. Raises CorruptCheckpoint and CheckpointMismatch.
    """
    slots = planned(name, state, manifest["scalars"], table_of(manifest))
    wanted = chunks_of(state.saved(slots))
    return ChunkRestore(
        name, manifest, sources, wanted, slots=slots, partial=state.partial, progress=progress
    )


def prepared(state: TrainState, checkpoint: Checkpoint, progress: Progress = quiet) -> ChunkRestore:
    """As ``reading_of``, of a checkpoint on disk."""
    manifest = checkpoints.manifest_of(checkpoint)
    sources = partial(checkpoints.source_of, checkpoint)
    return reading_of(state, checkpoint.name, manifest, sources, progress)


def load(state: TrainState, reading: ChunkRestore) -> None:
    """Fill the state from a reading that verified. Raises HalfLoaded."""
    reading.load()
    state.load_scalars(reading.scalars, reading.slots)


def restore_newest(
    state: TrainState,
    directory: Path,
    refused: Callable[[Checkpoint, str], None],
    *,
    progress: Progress = quiet,
) -> Checkpoint | None:
    """Load the newest checkpoint of a directory that verifies into the state of one process; None
    when there is none. ``refused``: called for bad ones. Raises as ``restore_first``.
    """
    known = {found.step: found for found in checkpoints.newest_first(directory)}
    taken = restore_first(
        state,
        (Candidate(step=step) for step in known),
        lambda candidate: nullcontext(prepared(state, known[candidate.step], progress)),
        lambda candidate, why: refused(known[candidate.step], why),
    )
    return known[taken.step] if taken is not None else None


# ---- all ranks that hold a state


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint that may be restored: on disk, or, with a number of ``shards``, in memory, saved
    by a ``generation``.
    """

    step: int
    generation: int = 0
    shards: int = 0

    @property
    def name(self) -> str:
        """Its name in events."""
        return (header if self.shards else checkpoints).name_of(self.step)


def restore_first(
    state: TrainState,
    candidates: Iterable[Candidate],
    prepare: Callable[[Candidate], AbstractContextManager[ChunkRestore]],
    refused: Callable[[Candidate, str], None],
    *,
    group: Group | None = None,
    layout: Layout | None = None,
    device: str = "cpu",
) -> Candidate | None:
    """Load the first of the candidates that verifies; None when there is none.

    With a ``group`` all its ranks call it: rank 0 proposes its candidates one after the other,
    those of the first replica load, and the others only learn which it is. ``refused``: called on
    the ranks where one does not verify. Raises GenerationLost, and on all ranks alike HalfLoaded,
    and CheckpointMismatch with nothing loaded, for a good one of another job.
    """
    reads = group is None or layout is None or layout.replica_of(group.rank) == 0
    for candidate in candidates if group is None else _proposed(candidates, group, device):
        with ExitStack() as stack:
            reading, vote = None, _GOOD
            error: CorruptCheckpoint | CheckpointMismatch | None = None
            try:
                if reads:
                    reading = stack.enter_context(prepare(candidate))
                    reading.verify()
            except CorruptCheckpoint as problem:
                vote, error = _CORRUPT, problem
            except CheckpointMismatch as problem:
                vote, error = _MISMATCH, problem
            given = [vote] if group is None else votes(group, vote, device)
            if _MISMATCH in given:
                if isinstance(error, CheckpointMismatch):
                    raise error
                raise CheckpointMismatch(
                    f"{candidate.name} does not fit rank {given.index(_MISMATCH)} of this job",
                    hint="its log says what differs",
                )
            if _CORRUPT in given:
                if error is not None:
                    refused(candidate, str(error))
                continue
            _load(state, reading, candidate.name, group, device)
            return candidate
    return None


def _load(
    state: TrainState, reading: ChunkRestore | None, name: str, group: Group | None, device: str
) -> None:
    error: HalfLoaded | None = None
    try:
        if reading is not None:
            load(state, reading)
    except HalfLoaded as problem:
        error = problem
    given = votes(group, _HALF if error else _GOOD, device) if group is not None else []
    if error is not None:
        raise error
    if _HALF in given:
        raise HalfLoaded(
            f"{name} changed while rank {given.index(_HALF)} read it",
            hint="start these processes anew",
        )


def _proposed(candidates: Iterable[Candidate], group: Group, device: str) -> Iterator[Candidate]:
    """What rank 0 proposes, on every rank."""
    mine = iter(candidates if group.rank == 0 else ())
    while True:
        words = torch.full((3,), -1, dtype=torch.int64, device=device)
        if (candidate := next(mine, None)) is not None:
            about = [candidate.step, candidate.generation, candidate.shards]
            words = torch.tensor(about, dtype=torch.int64, device=device)
        group.broadcast(words, 0)
        step, generation, shards = (int(word) for word in group.read(words))
        if step < 0:
            return
        yield Candidate(step=step, generation=generation, shards=shards)


def votes(group: Group, vote: int, device: str) -> list[int]:
    """The vote of each rank, by rank."""
    votes = torch.zeros(group.world, dtype=torch.int64, device=device)
    votes[group.rank] = vote
    group.wait(group.start_all_reduce(votes))
    return [int(value) for value in group.read(votes)]


# ---- whether a checkpoint fits the job


def planned(
    name: str, state: TrainState, scalars: Mapping[str, Any], table: Mapping[str, Mapping[str, Any]]
) -> Slots:
    """Slots of the optimizer as a checkpoint has them, and room in ``state.own`` for what it has of
    other ranks. ``table``: type and shape of its tensors. Raises CheckpointMismatch.
    """
    state.own = {}
    mine = state.scalars()
    there, here = _rules(scalars), _rules(mine)
    if there["parameter groups"] >= mine["optimizer"]["built"]:
        # the loop adds some, or is about to do it again
        there["parameter groups"] = here["parameter groups"]
    refuse(name, there, {rule: here[rule] for rule in there})
    made = mine["optimizer"]["made"]
    saved = scalars.get("optimizer", mine["optimizer"])["made"]
    if saved != made:
        refuse_foreign(
            name, table, chunks_of(state.tensors(state.expected())), partial=state.partial
        )
        refuse(name, {"what the optimizer keeps": saved}, {"what the optimizer keeps": made})
    models = {key: tensor for key, tensor in state.tensors().items() if key.startswith("model.")}
    refuse_foreign(
        name,
        {key: entry for key, entry in table.items() if key.startswith("model.")},
        chunks_of(models),
        partial=state.partial,
    )
    try:
        slots = state.planned(scalars)
    except ValueError as error:
        raise _mismatch(name, str(error)) from error
    state.own = state.room_for_own(table)
    return slots


def _rules(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in checkpoint and process. Older checkpoints do not name the type of
    the optimizer, whose slots are compared instead.
    """
    optimizer = scalars.get("optimizer")
    groups = scalars["lr"] if optimizer is None else optimizer["groups"]
    kind = {} if optimizer is None else {"optimizer": optimizer["type"]}
    return {
        "seed": scalars["seed"],
        **kind,
        "parameter groups": len(groups),
        "scheduler": sorted(scalars["scheduler"]),
    }


def refuse_foreign(
    name: str,
    saved: Mapping[str, Mapping[str, Any]],
    wanted: Sequence[Chunk],
    *,
    partial: bool = False,
) -> None:
    """Raise CheckpointMismatch unless names, types and shapes are the same. ``partial``: more may
    be saved than is wanted here.
    """
    here = {chunk.name: f"{chunk.dtype} {list(chunk.shape)}" for chunk in wanted}
    there = {
        key: f"{entry['dtype']} {list(entry['shape'])}"
        for key, entry in saved.items()
        if key in here or not (partial or key.startswith(OWN))
    }
    refuse(name, there, here)


def refuse(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch, naming the first differences, unless both say the same."""
    if here == there:
        return
    differ = [
        f"{key} is {there[key]} there, {here[key]} here"
        for key in here
        if key in there and here[key] != there[key]
    ]
    differ += [f"{key} is only in the checkpoint" for key in there if key not in here]
    differ += [f"{key} is only in the job" for key in here if key not in there]
    more = f" (and {len(differ) - NAMED} more)" if len(differ) > NAMED else ""
    raise _mismatch(name, "; ".join(differ[:NAMED]) + more)


def _mismatch(name: str, what: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{name} does not fit this job: {what}",
        hint=(
            "use the seed, model, optimizer, scheduler and types that wrote it (the number of ranks"
            " may differ), or another checkpoint directory"
        ),
    )
