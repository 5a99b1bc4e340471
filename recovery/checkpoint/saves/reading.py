"""Verified restore: live state is untouched until everything that is wanted has been read and
checked.

A fresh process holds initial values that nothing else could bring back, and a checkpoint may turn
out bad at its last byte. So all wanted pieces are read twice: first to check them, then, from the
page cache, into the tensors, checked again. That takes less time than it seems (the first pass is
as fast as the disk) and no memory of its own.

Wanted ranges are boxes of global tensors, and so are saved chunks: what four ranks saved can be
loaded by one, two or eight.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Box
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainchaos.chaos.errors import ChaosError
from trainchaos.recovery.checkpoint.files import checkpoints, pieces
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint
from trainchaos.recovery.checkpoint.files.manifest import stream_of
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint, Piece
from trainchaos.recovery.checkpoint.saves.chunks import OWN, Chunk, chunks_of, flat
from trainchaos.recovery.state import strides
from trainchaos.recovery.state.digest import own_memory
from trainchaos.recovery.state.optimizer_state import Slots
from trainchaos.recovery.state.state import TrainState

NAMED = 3  # differences that an error names
SMALL_BYTES = 64 << 10  # for smaller copies the call takes longer than the copy


class CheckpointMismatch(ChaosError):
    """A good checkpoint, but of another model, optimizer, seed or type; nothing was loaded."""


class HalfLoaded(ChaosError):
    """Data changed between being checked and being loaded: the state holds some of it, and must not
    be used.
    """


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
    types and shapes), ``verify``, ``load``. ``partial``: see ``refuse_foreign``; ``progress``:
    called meanwhile. Raises CorruptCheckpoint and CheckpointMismatch.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        wanted: Sequence[Chunk],
        *,
        manifest: Mapping[str, Any] | None = None,
        slots: Slots | None = None,
        partial: bool = False,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.manifest = checkpoints.manifest_of(checkpoint) if manifest is None else manifest
        self.slots = slots
        self._progress = progress
        self._streams: dict[str, _Stream] = {}
        self._boxes: list[tuple[Tensor, Tensor]] = []  # (a box of a copy, the live box it goes to)
        tensors = table_of(self.manifest)
        refuse_foreign(checkpoint.name, tensors, wanted, partial=partial)
        for name in self.manifest["files"]:
            stream = stream_of(self.manifest, name)
            ends = list(itertools.accumulate((piece.size for piece in stream), initial=0))
            self._streams[name] = _Stream(pieces=stream, starts=ends[:-1])
        for chunk in wanted:
            self._want(chunk, tensors[chunk.name])

    @property
    def scalars(self) -> dict[str, Any]:
        """What the manifest keeps beside the tensors."""
        return dict(self.manifest["scalars"])

    def verify(self) -> None:
        """Check every piece that holds a wanted part. Raises CorruptCheckpoint."""
        for name, stream in self._streams.items():
            numbers = sorted(stream.targets)
            chosen = [stream.pieces[number] for number in numbers]
            pieces.check(
                chosen, checkpoints.path_of(self.checkpoint, name), progress=self._progress
            )

    def load(self) -> None:
        """Fill the wanted chunks. Raises HalfLoaded."""
        try:
            for name, stream in self._streams.items():
                self._load(name, stream)
        except CorruptCheckpoint as error:
            raise HalfLoaded(
                f"{self.checkpoint.name} changed while it was read: {error}",
                hint="start this process anew",
            ) from error
        with torch.no_grad():
            for copy, live in self._boxes:
                strides.copy(live, copy, self._progress or strides.quiet)

    def _load(self, name: str, stream: _Stream) -> None:
        targets = stream.targets
        numbers = sorted(targets)

        def use(index: int, data: memoryview) -> None:
            source = torch.frombuffer(data, dtype=torch.uint8)
            for into, start, size in targets[numbers[index]]:
                own = own_memory(into) if size <= SMALL_BYTES else None
                if own is not None:
                    own[:] = data[start : start + size]
                else:
                    into.copy_(source[start : start + size])

        chosen = [stream.pieces[number] for number in numbers]
        pieces.check(
            chosen, checkpoints.path_of(self.checkpoint, name), use, progress=self._progress
        )

    def _want(self, chunk: Chunk, entry: Mapping[str, Any]) -> None:
        """Find the parts of a chunk. Raises CorruptCheckpoint when a part is missing."""
        saved = entry["chunks"]
        if _is_whole(chunk, saved):  # the usual case: saved in one chunk, and wanted as a whole
            origin = (0,) * len(chunk.shape)
            self._take(chunk, flat(chunk.data), saved[0], origin, origin, chunk.size)
            return
        found = 0
        live = flat(chunk.data)
        for item in create_read_items_for_chunk_list(
            chunk.name, _metadata(chunk, saved), [_box(chunk.at, chunk.size)]
        ):
            source = saved[item.storage_index.index or 0]
            found += math.prod(item.lengths)
            self._take(
                chunk,
                live,
                source,
                tuple(item.storage_offsets),
                tuple(item.dest_offsets),
                tuple(item.lengths),
            )
        if found != chunk.data.numel():
            raise CorruptCheckpoint(
                f"the manifest has {found} of {chunk.data.numel()} values of {chunk.name}"
            )

    def _take(
        self,
        chunk: Chunk,
        live: Tensor | None,
        source: Mapping[str, Any],
        start: tuple[int, ...],
        into: tuple[int, ...],
        size: tuple[int, ...],
    ) -> None:
        """``size``: of the box that lies at ``start`` in the saved chunk and at ``into`` in the
        live one.
        """
        element = chunk.data.element_size()
        stream = self._streams.get(source["file"])
        if stream is None:
            raise CorruptCheckpoint(f"the manifest has no file {source['file']!r}")
        if live is not None and size[1:] == tuple(source["size"][1:]) == chunk.size[1:]:
            row = math.prod(size[1:]) * element
            first, last = (into[0] * row, (into[0] + size[0]) * row) if size else (0, element)
            stream.wanted.append(
                (source["offset"] + (start[0] * row if size else 0), live[first:last])
            )
            return
        # of all of the saved chunk, on the host
        copy = torch.empty(source["size"], dtype=chunk.data.dtype)
        bytes_ = flat(copy)
        assert bytes_ is not None
        stream.wanted.append((source["offset"], bytes_))
        self._boxes.append((_narrow(copy, start, size), _narrow(chunk.data, into, size)))


def _is_whole(chunk: Chunk, saved: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the tensor was saved in one chunk, and all of it is wanted."""
    return (
        len(saved) == 1
        and 0 not in chunk.shape
        and tuple(chunk.data.shape) == chunk.size == chunk.shape == tuple(saved[0]["size"])
        and not any(chunk.at)
        and not any(saved[0]["at"])
    )


def refuse_foreign(
    name: str,
    saved: Mapping[str, Mapping[str, Any]],
    wanted: Sequence[Chunk],
    *,
    partial: bool = False,
) -> None:
    """Raise CheckpointMismatch, naming the first differences, unless names, types and shapes are
    the same. ``partial``: more may be saved than is wanted here.
    """
    here = {chunk.name: (chunk.dtype, list(chunk.shape)) for chunk in wanted}
    there = {
        key: (entry["dtype"], list(entry["shape"]))
        for key, entry in saved.items()
        if key in here or not (partial or key.startswith(OWN))
    }
    if here == there:
        return
    differ = [
        f"{key} is {_words(there[key])} there, {_words(here[key])} here"
        for key in here
        if key in there and here[key] != there[key]
    ]
    differ += [f"{key} is only in the checkpoint" for key in there if key not in here]
    differ += [f"{key} is only in the job" for key in here if key not in there]
    more = f" (and {len(differ) - NAMED} more)" if len(differ) > NAMED else ""
    raise CheckpointMismatch(
        f"{name} does not fit this job: {'; '.join(differ[:NAMED])}{more}",
        hint=(
            "use the model, optimizer and types that wrote it (the number of ranks may differ), or"
            " another checkpoint directory"
        ),
    )


def refuse_other_scalars(name: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """As ``refuse_foreign``, for values that are not tensors. ``here``: TrainState.scalars()."""
    if saved["seed"] != here["seed"]:
        raise CheckpointMismatch(
            f"{name} is of a job of seed {saved['seed']}, this one has seed {here['seed']}",
            hint="use that seed, or another checkpoint directory",
        )
    there, ours = _rules(saved), _rules(here)
    built = here["optimizer"]["built"]
    if there["parameter groups"] >= built:  # the loop adds some, or is about to do it again
        there["parameter groups"] = ours["parameter groups"]
    for what in there:
        if there[what] != ours[what]:
            raise CheckpointMismatch(
                f"{name} does not fit this job: {what}: {there[what]} there, {ours[what]} here",
                hint=(
                    "use the optimizer and scheduler that wrote it, or another checkpoint directory"
                ),
            )


def planned(
    name: str, state: TrainState, scalars: Mapping[str, Any], table: Mapping[str, Mapping[str, Any]]
) -> Slots:
    """Slots of the optimizer as a checkpoint has them, and room in ``state.own`` for what it has of
    other ranks. ``table``: type and shape of its tensors. Raises CheckpointMismatch.
    """
    state.own = {}
    here = state.scalars()
    refuse_other_scalars(name, scalars, here)
    ours, theirs = here["optimizer"]["made"], scalars.get("optimizer", here["optimizer"])["made"]
    held = {key: tensor for key, tensor in state.tensors().items() if key.startswith("model.")}
    wanted = {chunk.name: chunk for chunk in chunks_of(held)}
    model = {
        key: (entry["dtype"], list(entry["shape"]))
        for key, entry in table.items()
        if key[:6] == "model." and (key in wanted or not state.partial)
    }
    if theirs != ours or model != {key: (c.dtype, list(c.shape)) for key, c in wanted.items()}:
        expected = chunks_of(state.tensors(state.expected()))
        refuse_foreign(name, table, expected, partial=state.partial)
    problem = (
        f"the optimizer keeps {', '.join(theirs)} there, {', '.join(ours)} here"
        if theirs != ours
        else ""
    )
    try:
        slots = state.planned(scalars)
    except ValueError as error:
        problem = problem or str(error)
    if problem:
        raise CheckpointMismatch(
            f"{name} does not fit this job: {problem}",
            hint="use the model and optimizer that wrote it, or another checkpoint directory",
        )
    state.own = state.room_for_own(table)
    return slots


def _rules(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in checkpoint and process. Older checkpoints do not name the type of
    the optimizer, whose slots are compared instead.
    """
    optimizer = scalars.get("optimizer")
    groups = scalars["lr"] if optimizer is None else optimizer["groups"]
    rules = {"parameter groups": len(groups), "scheduler": sorted(scalars["scheduler"])}
    return rules if optimizer is None else {"optimizer": optimizer["type"], **rules}


def _words(kind: tuple[str, list[int]]) -> str:
    return f"{kind[0]} {kind[1]}"


def table_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Type and shape of each tensor. Raises CorruptCheckpoint."""
    try:
        return dict(manifest["tensors"])
    except (KeyError, TypeError, ValueError):
        raise CorruptCheckpoint("the manifest lists no tensors") from None


def _narrow(tensor: Tensor, at: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(at, size, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _box(at: Sequence[int], size: Sequence[int]) -> Box:
    return Box(offsets=torch.Size(at), sizes=torch.Size(size))


def _metadata(chunk: Chunk, saved: Sequence[Mapping[str, Any]]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=chunk.data.dtype),
        size=torch.Size(chunk.shape),
        chunks=[_box(entry["at"], entry["size"]) for entry in saved],
    )
