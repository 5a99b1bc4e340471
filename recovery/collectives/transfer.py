"""Copies the full training state from one rank to those that need it, as tensors; nothing is
pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from trainchaos.recovery.collectives.group import Circle, GenerationLost
from trainchaos.recovery.state.digest import own_memory
from trainchaos.recovery.state.optimizer_state import Slots
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import Progress, quiet
from trainchaos.recovery.state.typed import name_of

# of one message, so that all show progress however large a tensor is
CHUNK_BYTES = 8 * 1024 * 1024
UNDER_WAY = 2  # messages: one travels while another is packed or unpacked
MAX_SCALAR_BYTES = 64 << 20
SMALL_BYTES = 64 << 10  # of a tensor: what copies it then takes longer to call than to run
FORM_DIGITS = 16


def copy_state(
    state: TrainState,
    circle: Circle,
    *,
    source: int,
    receive: bool,
    progress: Progress,
    feeds: Sequence[int] | None = None,
    device: str = "cpu",
) -> None:
    """Copy the state of rank ``source`` to the ranks that pass ``receive``, and what ``source`` has
    of other ranks (``TrainState.own``). ``device``: where the job trains.

    ``feeds`` None: every rank of the circle, of those that hold the same part, takes part in a
    broadcast, in which ranks that need nothing only pass data on: one tree, however many receive.
    Else from rank to rank, over gloo: ``source`` sends to those that it ``feeds``, and nobody else
    takes part. A receiver's state is undefined until this returns. ``progress`` is called after
    each message, of at most CHUNK_BYTES, by whoever sends, receives or passes it on. Raises
    GenerationLost when a peer is lost in the middle, RuntimeError when the peer's state is of
    another form.
    """
    sending = circle.rank == source
    route: _Route = _Broadcast(circle, source)
    wire = torch.device(device) if circle.backend == "nccl" else None
    if feeds is not None:
        # gloo takes what is on a GPU to a broadcast, and not from rank to rank
        route, wire = _Direct(circle, source, feeds), torch.device("cpu")
    tensors = [] if receive and not sending else [*state.parts().values()]
    form, own_bytes, scalars = _share_scalars(state, route, tensors, sending, wire)
    slots = None
    # A rank that only passes data on needs buffers of the same sizes, which it takes from its own
    # state.
    if not sending and (receive or form != _form_of(tensors)):
        slots, tensors = _planned(state, scalars(), source, form)
    parts = [tensors]
    if own_bytes:
        parts += [
            [
                torch.cat([*state.own.values()])
                if sending
                else torch.empty(own_bytes, dtype=torch.uint8)
            ]
        ]
    with torch.no_grad():
        for part in parts:
            if sending:
                _send(route, part, wire, progress)
            else:
                _receive(route, part, wire, progress, keeps=receive)
    if receive and not sending:
        state.load_scalars(scalars(), slots)
        sizes = scalars().get("own", {})
        state.own = (
            dict(zip(sizes, parts[-1][0].split([*sizes.values()]), strict=True)) if sizes else {}
        )


def _planned(
    state: TrainState, scalars: dict[str, Any], source: int, form: str
) -> tuple[Slots, list[Tensor]]:
    """Slots and tensors for a state of this form. Raises RuntimeError."""
    try:
        slots = state.planned(scalars)
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"the state of rank {source} cannot be held here: {error}") from error
    tensors = [local(tensor) for tensor in state.tensors(slots).values()]
    if form != _form_of(tensors):
        raise RuntimeError(
            f"the tensors of rank {source} are others: build model and optimizer alike everywhere,"
            " and make each buffer before job.attach, in the shape that it keeps"
        )
    return slots, tensors


class _Route(Protocol):
    """How a message goes. ``circle``: within which."""

    circle: Circle

    def start(self, message: Tensor) -> list[Any]:
        """Begin to pass on or to get the next message; what to wait for. Raises GenerationLost."""


@dataclass
class _Broadcast:
    circle: Circle
    source: int

    def start(self, message: Tensor) -> list[Any]:
        return [self.circle.start_broadcast(message, self.source)]


@dataclass
class _Direct:
    """``feeds``: the ranks that this one sends to; it receives of ``source`` if there are none."""

    circle: Circle
    source: int
    feeds: Sequence[int]
    _tags: Iterator[int] = field(default_factory=count)

    def start(self, message: Tensor) -> list[Any]:
        tag = next(self._tags)
        if self.feeds:
            return [self.circle.send(message, to, tag) for to in self.feeds]
        return [self.circle.receive(message, self.source, tag)]


def _send(
    route: _Route, tensors: Sequence[Tensor], wire: torch.device | None, progress: Progress
) -> None:
    under_way: deque[tuple[list[Any], Tensor]] = deque()
    rooms = _Rooms()
    for chunk in _chunks(tensors):
        if len(under_way) == UNDER_WAY:
            _done(route, under_way.popleft()[0], progress)
        buffer = _packed(chunk)
        if wire is not None and wire.type != buffer.device.type:
            buffer = rooms.next(buffer.nbytes, wire, pinned=buffer.is_cuda).copy_(buffer)
        under_way.append((route.start(buffer), buffer))
    for works, _ in under_way:
        _done(route, works, progress)


class _Rooms:
    """Memory for the messages that are under way, used in turn."""

    def __init__(self) -> None:
        self._rooms: deque[Tensor | None] = deque([None] * UNDER_WAY)

    def next(self, size: int, on: torch.device, *, pinned: bool) -> Tensor:
        """``size`` bytes that were used UNDER_WAY messages before. ``pinned``: a GPU copies them,
        which takes many times as long otherwise.
        """
        room = self._rooms.popleft()
        if room is None or room.device != on or len(room) < size:
            pinned = pinned and on.type == "cpu"
            size_made = max(size, CHUNK_BYTES)
            room = torch.empty(size_made, dtype=torch.uint8, device=on, pin_memory=pinned)
        self._rooms.append(room)
        return room[:size]


def _receive(
    route: _Route,
    tensors: Sequence[Tensor],
    wire: torch.device | None,
    progress: Progress,
    *,
    keeps: bool,
) -> None:
    """``keeps``: put into the tensors what comes; otherwise it is passed on only.

    It comes into buffers of this copy alone, and not at once into the tensors: a message that is
    broken off may be written to later.
    """
    under_way: deque[tuple[list[Any], Tensor, list[Tensor]]] = deque()
    rooms = _Rooms()

    def take(works: list[Any], buffer: Tensor, chunk: list[Tensor]) -> None:
        _done(route, works, progress)
        if keeps:
            _unpack(buffer.to(chunk[0].device), chunk)

    for chunk in _chunks(tensors):
        if len(under_way) == UNDER_WAY:
            take(*under_way.popleft())
        size, on = sum(part.nbytes for part in chunk), wire or chunk[0].device
        buffer = rooms.next(size, on, pinned=chunk[0].is_cuda)
        under_way.append((route.start(buffer), buffer, chunk))
    for message in under_way:
        take(*message)


def _done(route: _Route, works: Sequence[Any], progress: Progress = quiet) -> None:
    """Wait until a message is here, or has been sent. Raises GenerationLost."""
    for work in works:
        route.circle.wait(work)
    route.circle.settle()
    progress()


def _packed(chunk: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors of one device, one after the other; those of a single tensor where they
    are, if they are in order.
    """
    if len(chunk) == 1 and chunk[0].is_contiguous():
        return chunk[0].detach().reshape(-1).view(torch.uint8)
    memory = [own_memory(tensor) for tensor in chunk]
    if any(own is None for own in memory):
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in chunk])
    data = bytearray().join(own for own in memory if own is not None)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _unpack(buffer: Tensor, chunk: Sequence[Tensor]) -> None:
    """The other way round: fill tensors from the bytes of all."""
    data, start = own_memory(buffer), 0
    for tensor in chunk:
        size = tensor.nbytes
        own = own_memory(tensor) if data is not None and size <= SMALL_BYTES else None
        if own is not None and data is not None:
            own[:] = data[start : start + size]
        else:
            tensor.copy_(buffer[start : start + size].view(tensor.dtype).view_as(tensor))
        start += size


def _share_scalars(
    state: TrainState,
    route: _Route,
    tensors: Sequence[Tensor],
    sending: bool,
    wire: torch.device | None,
) -> tuple[str, int, Callable[[], dict[str, Any]]]:
    """What the sender has of the state besides ``tensors``, as one message of bytes, the form of
    its tensors, and the bytes that follow them.
    """
    data = b""
    if sending:
        own = {name: len(one) for name, one in state.own.items()}
        scalars = state.scalars() | ({"own": own} if own else {})
        follow = f"{sum(own.values()):0{FORM_DIGITS}x}"
        data = f"{_form_of(tensors)}{follow}{json.dumps(scalars)}".encode()
    announced = torch.tensor([len(data)], dtype=torch.int64, device=wire)
    _done(route, route.start(announced))
    size = len(data) if sending else int(announced)
    if not 2 * FORM_DIGITS < size <= MAX_SCALAR_BYTES:
        raise GenerationLost(f"a peer announced {size} bytes of scalars")
    message = torch.frombuffer(bytearray(data or size), dtype=torch.uint8).to(wire or "cpu")
    _done(route, route.start(message))
    data = data or message.cpu().numpy().tobytes()
    form, bytes_ = data[:FORM_DIGITS].decode(), int(data[FORM_DIGITS : 2 * FORM_DIGITS], 16)
    return form, bytes_, cache(lambda: dict(json.loads(data[2 * FORM_DIGITS :])))


def _form_of(tensors: Sequence[Tensor]) -> str:
    """Tells whether tensors are the same by type and shape: chunks of other sizes would be filled
    with garbage.
    """
    text = repr([(name_of(t.dtype), t.shape) for t in tensors])
    return hashlib.blake2b(text.encode(), digest_size=FORM_DIGITS // 2).hexdigest()


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors, and parts of large ones, grouped into messages of at most CHUNK_BYTES, one device
    each; the same on every rank.

    Parts are ordered by element size, so that every slice of a byte buffer is aligned for its
    dtype. Those that lie in the host's memory (an optimizer's step counters) share a message, which
    goes over the device as any other where the group takes nothing else.
    """
    tensors = sorted(
        tensors, key=lambda t: ("cpu" if t.is_cpu else t.device.type, -t.element_size())
    )
    chunks: list[list[Tensor]] = []
    size, device = 0, None
    for tensor in tensors:
        more, on = tensor.nbytes, tensor.device
        if more > CHUNK_BYTES:
            chunks += [[part] for part in _cut(tensor, more)]
            size = CHUNK_BYTES
        elif size + more > CHUNK_BYTES or on != device:
            chunks.append([tensor])
            size = more
        else:
            chunks[-1].append(tensor)
            size += more
        device = on
    return chunks


def _cut(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Views of at most CHUNK_BYTES that cover a tensor of ``size`` bytes. They follow from its
    shape alone: in another process its values may lie in memory in another order.
    """
    if size <= CHUNK_BYTES or not tensor.dim():
        yield tensor
        return
    rows = CHUNK_BYTES * len(tensor) // size
    if not rows:
        for row in tensor:
            yield from _cut(row, size // len(tensor))
        return
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows]
