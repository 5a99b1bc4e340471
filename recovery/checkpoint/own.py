"""What a rank has of its own in the state: buffers of the model and what the script has registered,
which may rightly differ from rank to rank.

A checkpoint has those of the rank that writes it as part of the state, and of each other rank that
holds the same part of the model, where they differ, as one more tensor. A rank that restores gets
its own back. A rank that the checkpoint does not know has those of the rank whose state it copies,
as has one that takes the place of a lost rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy
import torch
import xxhash
from torch import Tensor

from trainchaos.recovery.checkpoint.chunks import OWN
from trainchaos.recovery.collectives.group import Circle
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import Progress
from trainchaos.recovery.state.typed import dtype_of, name_of

_WORD = 8
_ROOM = 4096  # a state of about the same size takes the same room, which memory checkpoints reuse


def name(layout: Layout, rank: int) -> str:
    """Of a rank's own in a checkpoint: its replica and its part of the model."""
    return f"{OWN}{layout.replica_of(rank)}.{layout.shard_of(rank)}-{layout.shards}"


def fit(table: Mapping[str, Mapping[str, object]], layout: Layout, rank: int) -> dict[str, Tensor]:
    """Room for what a checkpoint has for the ranks that hold what this one does. ``table``: type
    and shape of each of its tensors.
    """
    names = [name(layout, holder) for holder in layout.holders(layout.shard_of(rank))]
    shapes = {one: table[one]["shape"] for one in names if one in table}
    return {one: torch.empty(shape, dtype=torch.uint8) for one, shape in shapes.items()}  # type: ignore[call-overload]


def packed(state: TrainState, but: Mapping[str, int] | None = None) -> Tensor:
    """What this rank has of its own, as bytes; without tensors of which ``but`` has the digest."""
    tensors = state.besides()
    if but is not None:
        mine = digests_of(state, tensors)
        tensors = {key: one for key, one in tensors.items() if but.get(key) != mine[key]}
    header = {
        "tensors": [[key, name_of(t.dtype), list(t.shape)] for key, t in tensors.items()],
        "registered": state.registered.scalars(),
    }
    text = json.dumps(header).encode()
    data = bytearray().join(
        [len(text).to_bytes(_WORD, "little"), text, *map(bytes_of, tensors.values())]
    )
    data.extend(bytes(-len(data) % _ROOM))
    return torch.frombuffer(data, dtype=torch.uint8)


def unpack(state: TrainState, data: Tensor) -> None:
    """Take over what ``packed`` returned. Raises ValueError for what is not of this state,
    LoadError.
    """
    raw = memoryview(data.numpy().data)
    at = _WORD + int.from_bytes(raw[:_WORD], "little")
    header, besides = json.loads(bytes(raw[_WORD:at])), state.besides()
    with torch.no_grad():
        for key, kind, shape in header["tensors"]:
            tensor = besides.get(key)
            if tensor is None or (name_of(tensor.dtype), list(tensor.shape)) != (kind, shape):
                raise ValueError(f"{key} is {kind} {shape} in a rank's own state, and not so here")
            if tensor.nbytes:
                array = numpy.frombuffer(raw[at : at + tensor.nbytes], dtype=numpy.uint8)
                flat = torch.from_numpy(array.copy()).view(dtype_of(kind))
                tensor.copy_(flat.view(tensor.shape))
                at += tensor.nbytes
    state.registered.load(header["registered"])


def gathered(
    state: TrainState, circle: Circle, layout: Layout, progress: Progress
) -> dict[str, Tensor]:
    """Of the ranks that hold the same part, what the first of them saves besides its own state; a
    collective of all, and nothing for the others. Raises GenerationLost.
    """
    besides, rank, first = state.besides(), circle.rank, circle.ranks[0]
    if not besides and not state.registered:
        return {}
    found: dict[str, Tensor] = {}
    if rank == first and layout.shard_of(rank):  # else the state's names are this rank's
        found[name(layout, rank)] = packed(state)
    if len(circle.ranks) == 1:
        return found
    wire = torch.device(circle.device if circle.backend == "nccl" else "cpu")
    digests = digests_of(state, besides)
    rest = json.dumps(state.registered.scalars())
    mine = xxhash.xxh3_64_intdigest(f"{digests} {rest}".encode()) >> 1
    others = _table(circle, mine, wire)
    if len({*others}) == 1:
        return found
    text = json.dumps(digests).encode()
    size = torch.tensor([len(text)], device=wire)
    circle.broadcast(size, first)
    length = int(circle.read(size)[0])
    told = torch.frombuffer(bytearray(text if rank == first else length), dtype=torch.uint8)
    told = told.to(wire)
    circle.broadcast(told, first)
    own = torch.empty(0, dtype=torch.uint8)
    if rank != first and mine != others[0]:
        own = packed(state, json.loads(told.cpu().numpy().tobytes()))
    sizes = _table(circle, own.numel(), wire)
    for holder, amount in zip(circle.ranks, sizes, strict=True):
        if amount and (circle.backend == "nccl" or rank in (first, holder)):
            data = own.to(wire) if rank == holder else torch.empty(amount, dtype=torch.uint8)
            data = _sent(circle, data.to(wire), holder, first)
            if rank == first:
                found[name(layout, holder)] = data.cpu()
        progress()
    return found


def _sent(circle: Circle, data: Tensor, source: int, to: int) -> Tensor:
    """From one rank to another: over NCCL to all, whose communicators between two take memory."""
    if circle.backend == "nccl":
        circle.broadcast(data, source)
    elif circle.rank == source:
        circle.wait(circle.send(data, to, 0))
    else:
        circle.wait(circle.receive(data, source, 0))
    circle.settle()
    return data


def _table(circle: Circle, value: int, wire: torch.device) -> list[int]:
    """A number of each rank of the circle, in its order."""
    table = torch.zeros(len(circle.ranks), dtype=torch.int64, device=wire)
    table[circle.ranks.index(circle.rank)] = value
    circle.wait(circle.start_all_reduce(table))
    return [int(one) for one in circle.read(table)]


def digests_of(state: TrainState, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Of each the digest. What no step changes is hashed once: a gigabyte takes a tenth of a
    second, and on a GPU a copy to the host.
    """
    found: dict[str, int] = {}
    quiet = state.attempt.unchanged()
    for key, tensor in tensors.items():
        kept = tensor.data_ptr() in quiet
        held, version, digest = state.constant.get(key, (None, -1, 0))
        same = held is not None and held.data_ptr() == tensor.data_ptr()
        if not (kept and same and tensor._version == version):
            digest = xxhash.xxh3_64_intdigest(bytes_of(tensor))
        if kept:
            state.constant[key] = tensor, tensor._version, digest
        else:
            state.constant.pop(key, None)
        found[key] = digest
    return found
