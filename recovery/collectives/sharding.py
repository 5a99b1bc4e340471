"""Shards a model over the ranks that hold one copy of it, with torch's ``fully_shard`` (FSDP2).

The mesh is the job's (``recovery.collectives.lasting.job_mesh``); what the model has to exchange
goes to the circle of the current generation, through ``set_custom_all_gather`` and
``set_custom_reduce_scatter``. Nothing in the sharded model then belongs to a generation: when ranks
are lost, the others' parameters, gradients and optimizer state stay as they are, and only the
circle is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch._dynamo  # fully_shard imports it, in a moment when all wait for this rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainchaos.recovery.collectives.lost import require_no_group

_BACKEND = "rehearsal"


class ShardExchange(Protocol):
    """Where the collectives of a sharded model go. They are waited for, and raise
    GenerationLost.
    """

    def gather(self, output: Tensor, part: Tensor) -> None:
        """Put the parts of all shards together, by shard."""

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        """Sum over all shards; this rank gets its part."""


def default_units(model: nn.Module) -> list[nn.Module]:
    """The default units: each child with parameters of each ModuleList, such as the blocks of a
    transformer.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [child for each in lists for child in each if next(child.parameters(), None) is not None]


def shard_model(
    model: nn.Module,
    units: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    exchange: ShardExchange,
) -> None:
    """Keep one part of each parameter, in place, of those along ``mesh``. What is in no unit makes
    one of its own.
    """
    for module in [*units, model]:
        fully_shard(module, mesh=mesh)
    connect(model, exchange)


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on some of it."""
    return next(_fsdp(model), None) is not None


def connect(model: nn.Module, exchange: ShardExchange) -> None:
    """Let what ``fully_shard`` has made of a model exchange its parts there."""
    gather: Any = _Gather(exchange)
    scatter: Any = _Scatter(exchange)
    for part in _fsdp(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        part.set_custom_all_gather(gather)
        part.set_custom_reduce_scatter(scatter)


def rehearse(shards: int, device: str) -> None:
    """Shard and train a small model that is thrown away, alone: what torch does the first time only
    takes a quarter of a second, in which all others would wait for a spare that takes a place.
    Raises RuntimeError when the process is in a process group already.
    """
    require_no_group()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    try:
        shard_model(model, [model[0]], mesh=_mesh(shards, device), exchange=_Echo())
        parameters = list(model.parameters())
        # Those that are common; a first step of another takes what it takes.
        for optimizer in (
            torch.optim.AdamW(parameters, fused=True),
            torch.optim.AdamW(parameters),
            torch.optim.SGD(parameters, momentum=0.9),
        ):
            model(torch.ones(2, 4, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def reset(model: nn.Module) -> None:
    """Make the model usable after a forward or backward pass that was broken off; its gradients are
    lost.
    """
    for module in _fsdp(model):
        state: Any = module._get_fsdp_state()
        for group in _groups(state):
            for each in group.fsdp_params:
                # Torch keeps those of passes whose gradients are not reduced yet, as in a pipeline;
                # since 2.15 with the parameter.
                if "unsharded_accumulated_grad" in vars(each):
                    each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None
        if state._is_root:  # None before the first pass, when torch has nothing to reset
            if hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
            else:
                _reset_before_2_13(state)


def _groups(state: Any) -> list[Any]:
    """Parameters that are gathered together; torch 2.11 has one group at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _reset_before_2_13(root: Any) -> None:
    """Forget a pass that was broken off, as ``FSDPModule.reset_iter_state`` does since 2.13."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # in place of the events that are forgotten
    comms, passes = root._comm_ctx, root._state_ctx
    comms.all_gather_state = comms.reduce_scatter_state = None
    comms.post_forward_order.clear()
    for state in passes.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups(state):
            group._all_gather_result = group._reshard_after_forward_event = None
            group._post_reduce_event = group._all_reduce_state = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    passes.iter_forward_root = None
    passes.post_backward_final_callback_queued = False


def _fsdp(model: nn.Module) -> Iterator[FSDPModule]:
    """The sharded modules, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class _Echo:
    """An exchange without other ranks: every part is this rank's own."""

    def gather(self, output: Tensor, part: Tensor) -> None:
        output.view(-1, part.numel()).copy_(part.clone())

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        output.copy_(whole[: output.numel()])


class _NoGroup(dist.ProcessGroup):
    """Ranks and a name, which is all that a mesh needs of a group."""

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return _BACKEND

    @property
    def group_name(self) -> Any:
        """As registered."""
        return dist.distributed_c10d._world.pg_names[self]


def _mesh(shards: int, device: str) -> DeviceMesh:
    kind = torch.device(device).type
    dist.Backend.register_backend(_BACKEND, _no_group, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=shards)
    group = dist.group.WORLD
    assert group is not None
    return DeviceMesh.from_group(group, kind)


def _no_group(_store: object, rank: int, size: int, _timeout: object) -> _NoGroup:
    made: Any = _NoGroup
    return made(rank, size)  # type: ignore[no-any-return]


class _Comm:
    def __init__(self, exchange: ShardExchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch's default."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._exchange.gather(output_tensor, input_tensor)


class _Scatter(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._exchange.reduce_scatter(output_tensor, input_tensor)
