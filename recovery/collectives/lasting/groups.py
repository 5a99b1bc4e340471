"""Process groups that torch sees for as long as the job lives, while the connections behind them
change with each generation.

``LastingGroup`` is a process group written in Python, as torch allows; what is called on it goes to
a circle of the current generation, is waited for as every wait here is, and raises GenerationLost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from trainchaos.recovery.collectives.group import Circle, GenerationLost, Group
from trainchaos.recovery.collectives.reduce import Reducer

BACKEND = "recovery"
_TorchGroup: Any = dist.ProcessGroup  # whose methods have several forms each
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_KNOWN = (*_SUMS, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


class LastingGroup(_TorchGroup):  # type: ignore[misc]
    """``name``: of the circle, as ``Group.circle`` has it; ``generation``: that it was last in, 0
    before the first. Used by the training thread.

    Rank and size are those of the current generation, or of the last. Operations raise
    GenerationLost once it is left or the job over, RuntimeError before the first.
    """

    def __init__(self, rank: int, size: int, name: str, reducer: Reducer) -> None:
        super().__init__(rank, size)
        self.name_of_circle = name
        self._at = rank, size
        self.generation = 0
        self._reducer = reducer
        self._circle: Circle | None = None
        self._left = False

    def join(self, group: Group) -> None:
        """What comes from now on goes to this generation."""
        circle = self._circle = group.circle(self.name_of_circle)
        self.generation = group.generation
        self._at = circle.ranks.index(circle.rank), len(circle.ranks)
        dist.distributed_c10d._world.pg_group_ranks[self] = {
            rank: place for place, rank in enumerate(circle.ranks)
        }

    def leave(self) -> None:
        """There is no generation until the next ``join``."""
        self._left, self._circle = self._left or self._circle is not None, None

    def away(self, is_so: bool) -> None:
        """Whether this process trains a step alone that counts for nothing: nobody answers."""
        self._left = is_so

    def end(self) -> None:
        """There is no other generation for this process, which may have been in none."""
        self._left, self._circle = True, None

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return BACKEND

    @property
    def group_name(self) -> Any:
        """As registered."""
        return dist.distributed_c10d._world.pg_names[self]

    def rank(self) -> int:
        """This rank's place among them."""
        return self._at[0]

    def size(self) -> int:
        """How many there are."""
        return self._at[1]

    getRank, getSize = rank, size

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Several operations are begun one by one."""
        return False

    @property
    def bound_device_id(self) -> None:
        """None: no communicator is split off this group."""

    @property
    def object_device(self) -> str:
        """Where the bytes of objects are to be that ranks exchange."""
        circle = self._circle
        return str(circle.device) if circle is not None and circle.backend == "nccl" else "cpu"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        for tensor in tensors:
            self._reduce(tensor, op)
        return work_done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """See torch."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = opts.rootRank
        for tensor in tensors:
            mine = [tensor] if opts.rootRank == self.rank() else []
            whole = tensor if tensor.is_contiguous() else tensor.contiguous()
            self._do(
                whole.nbytes,
                partial(_broadcast, whole, options),
                sent=mine,
                got=[] if mine else [whole],
            )
            if whole is not tensor:
                tensor.copy_(whole)
        return work_done(tensors)

    @torch.no_grad()
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for parts, own in zip(outputs, inputs, strict=True):
            if other := [part.shape for part in parts if part.shape != own.shape]:
                raise ValueError(f"all_gather of {own.shape} into {other[0]}")
            whole = own.new_empty((self.size(), *own.shape))
            self.all_gather_single(whole, own)
            for part, value in zip(parts, whole.unbind(), strict=True):
                part.copy_(value)
        return work_done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """See torch."""
        whole, part = output.view(-1), own.contiguous().view(-1)  # gloo goes by shapes
        if self.size() == 1:
            whole.copy_(part)
            return work_done(output)
        self._do(
            whole.nbytes,
            lambda made: made._allgather_base(whole, part),
            sent=[part],
            got=[whole],
        )
        return work_done(output)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """See torch."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return work_done(outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        for output, parts in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, torch.stack(parts), opts)
        return work_done(outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """See torch. Of sums and means: the parts are exchanged and added up here, since gloo's own
        is an all-reduce of everything, whose wait knows no time limit.
        """
        op, size = getattr(opts, "reduceOp", dist.ReduceOp.SUM), self.size()
        if not any(op == one for one in _SUMS):
            _refuse(f"reduce_scatter with {op}", "a sum")
        parts = torch.empty_like(whole, memory_format=torch.contiguous_format)
        self.all_to_all_single(parts, whole.contiguous(), [], [])
        torch.sum(parts.view(size, *output.shape), dim=0, out=output)
        if op == dist.ReduceOp.AVG:
            output.div_(size)
        return work_done(output)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """See torch."""
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return work_done(outputs)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, coming: list[int], going: list[int], opts: Any = None
    ) -> dist.Work:
        """See torch."""
        if self.size() == 1:
            output.copy_(own)
            return work_done(output)
        options, part = dist.AllToAllOptions(), own.contiguous()
        self._do(
            part.nbytes,
            lambda made: made.alltoall_base(output, part, coming, going, options),
            sent=[part],
            got=[output],
        )
        return work_done(output)

    _allgather_base = all_gather_single  # as torch called them before 2.12
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See torch; an all-reduce, whose result the others throw away."""
        for tensor in tensors:
            total = tensor.clone()
            self._reduce(total, opts.reduceOp)
            if opts.rootRank == self.rank():
                tensor.copy_(total)
        return work_done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """See torch."""
        device = self._joined().device
        self._reduce(torch.zeros(1, device=device), dist.ReduceOp.SUM)
        return work_done([])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """See torch. Waited for where torch's caller waits."""
        circle = self._joined()
        self._reducer.pass_on(tensors)
        parts = [_for_peers(circle, tensor).contiguous() for tensor in tensors]
        return _Later(
            self._reducer, circle, circle.start_with_peer(lambda made: made.send(parts, peer, tag))
        )

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """See torch. Waited for where torch's caller waits."""
        circle = self._joined()
        self._reducer.pass_on(())
        rooms = [_room_for_peers(circle, tensor) for tensor in tensors]
        work = circle.start_with_peer(lambda made: made.recv(rooms, peer, tag))
        return _Later(self._reducer, circle, work, tensors, rooms)

    @torch.no_grad()
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See torch; an all-gather, whose result the others throw away."""
        mine = opts.rootRank == self.rank()
        for place, own in enumerate(inputs):
            made = [torch.empty_like(own) for _ in range(self.size())]
            self.allgather([outputs[place] if mine else made], [own])
        return work_done(outputs)

    @torch.no_grad()
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """See torch; a broadcast, of which each rank takes its part."""
        self._joined()
        for place, part in enumerate(outputs):
            whole = part.new_empty((self.size(), *part.shape))
            if opts.rootRank == self.rank():
                torch.stack(inputs[place], out=whole)
            self.broadcast([whole], opts)
            part.copy_(whole[self.rank()])
        return work_done(outputs)

    def alltoall(self, *_: Any) -> NoReturn:
        """Refused."""
        _refuse("all_to_all", "all_to_all_single")

    def recv_anysource(self, *_: Any) -> NoReturn:
        """Refused."""
        _refuse("recv without a source", "recv(tensor, src=...)")

    def _reduce(self, tensor: Tensor, op: Any) -> None:
        if not any(op == one for one in _KNOWN):
            _refuse(f"all_reduce with {op}", "SUM, AVG, MIN, MAX or PRODUCT")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op  # type: ignore[assignment]
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._do(
            2 * whole.nbytes,
            lambda made: made.allreduce([whole], options),
            sent=[whole],
            got=[whole],
        )
        if op == dist.ReduceOp.AVG:
            whole.div_(self.size())
        if whole is not tensor:
            tensor.copy_(whole)

    def _do(
        self,
        ring_bytes: int,
        operation: Callable[[Any], dist.Work],
        *,
        sent: Sequence[Tensor],
        got: Sequence[Tensor],
    ) -> None:
        circle = self._joined()
        if len(circle.ranks) > 1:
            self._reducer.exchange(circle, ring_bytes, operation, sent=sent, got=got)

    def _joined(self) -> Circle:
        if self._circle is None and self._left:
            raise GenerationLost("this process has left its generation, or the job is over")
        if self._circle is None:
            raise RuntimeError(
                "torch.distributed was called while this process is in no generation of the job: it"
                " is served inside `while job.running():`. A model is cut up without it, by each"
                " process alone: parallelize_module(..., src_data_rank=None)"
            )
        return self._circle


class _Later(dist.Work):
    """An operation with one other rank. ``rooms``: where it fills the tensors that it ``got``, if
    not in them themselves.
    """

    def __init__(
        self,
        reducer: Reducer,
        circle: Circle,
        work: Any,
        got: Sequence[Tensor] = (),
        rooms: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._parts = reducer, circle, work, got
        self._rooms = rooms
        self._ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See torch. Raises GenerationLost."""
        self._end()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended and its result is in place. Raises GenerationLost."""
        if self._parts[2].is_completed():
            self._end()
        return self._ended

    def _end(self) -> None:
        if not self._ended:
            reducer, circle, work, got = self._parts
            reducer.await_peer(circle, work, got, self._land)
            self._ended = True

    def _land(self) -> None:
        for tensor, room in zip(self._parts[3], self._rooms, strict=False):
            if room is not tensor:
                tensor.data.copy_(room)  # a leaf that requires grad, as a stage's input, too


def _on_host(circle: Circle, tensor: Tensor) -> bool:
    """Whether what goes from rank to rank goes over the host: gloo takes memory of a GPU to
    operations of all ranks only.
    """
    return circle.backend == "gloo" and not tensor.is_cpu


def _for_peers(circle: Circle, tensor: Tensor) -> Tensor:
    return tensor.cpu() if _on_host(circle, tensor) else tensor


def _room_for_peers(circle: Circle, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu") if _on_host(circle, tensor) else tensor


def work_done(result: Any) -> dist.Work:
    """An operation that has ended, with this result."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    made: Any = torch._C._distributed_c10d
    return made._create_work_from_future(future)  # type: ignore[no-any-return]


def _broadcast(tensor: Tensor, options: dist.BroadcastOptions, made: Any) -> Any:
    return made.broadcast([tensor], options)


def _refuse(what: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"torch.distributed: {what} is not served by the groups of a job; use {instead}"
    )
