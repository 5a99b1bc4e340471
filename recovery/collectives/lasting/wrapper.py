"""DistributedDataParallel around a model that a job trains: it is made by each process alone, and
its own reduction is turned off for good, so that the job's does the work.

A wrapper is made before the process knows its rank, by spares and replacements while others train.
What its constructor exchanges is therefore answered locally: every process has built the same
values, and whoever joins later copies the state.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as _module

from trainchaos.recovery.collectives.lasting.groups import BACKEND, work_done
from trainchaos.recovery.collectives.lasting.job_mesh import is_a_jobs

_torch: Any = _module
_default_group_as_torch_does: Any = _torch._get_default_group
_TorchGroup: Any = dist.ProcessGroup
_ATTACH = (
    "attach the wrapper that the loop calls, job.attach(ddp, optimizer): the job reduces gradients,"
    " and turns DistributedDataParallel's own reduction off, with the hooks for it"
)


class _Alone(_TorchGroup):  # type: ignore[misc]
    """The group that a wrapper is made over: one rank, which has what others would send."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return BACKEND

    def rank(self) -> int:
        """The only one."""
        return 0

    def size(self) -> int:
        """One."""
        return 1

    getRank, getSize = rank, size

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """The constructor compares the number of parameters."""
        for parts, own in zip(outputs, inputs, strict=True):
            parts[0].copy_(own)
        return work_done(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """The constructor sends shapes, parameters and buffers."""
        return work_done(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> NoReturn:
        """A wrapper that is not attached reduces gradients. Raises RuntimeError."""
        raise RuntimeError("DistributedDataParallel reduced gradients by itself: " + _ATTACH)


class _NoReducer:
    """In place of a wrapper's own, whose buckets take as much memory as the gradients."""

    def _rebuild_buckets(self) -> bool:
        """As forward asks."""
        return False

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"DistributedDataParallel has no {name} in a job: " + _ATTACH)


_ALONE: list[_Alone] = []


def serve_wrappers() -> None:
    """From now on DistributedDataParallel can be made without ``init_process_group``, unless the
    script has called it.
    """

    def default_group() -> Any:
        if dist.is_initialized() and not is_a_jobs():
            return _default_group_as_torch_does()
        if not _ALONE:
            _ALONE.append(_Alone())
        return _ALONE[0]

    _torch._get_default_group = default_group


def wrappers_in(model: nn.Module) -> list[DistributedDataParallel]:
    """Around the model, and in it."""
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def check_wrapper(ddp: DistributedDataParallel) -> None:
    """Raise TypeError where the job could not do what this wrapper was told to do, or where a
    process that joins later could not make it.
    """
    made: Any = ddp
    reason = None
    if made.process_group not in _ALONE:
        reason = (
            "was made over a process group of the script's, for which a process that joins later"
            " would wait: leave out init_process_group and process_group=, and make it after"
            " recovery.join()"
        )
    elif made.parameters_to_ignore:
        names = ", ".join(sorted(made.parameters_to_ignore))
        reason = f"leaves parameters out ({names}), which the job would reduce: wrap without"
    elif made.is_multi_device_module:
        devices = sorted({str(parameter.device) for parameter in made.module.parameters()})
        reason = f"has parameters on several devices ({', '.join(devices)}): use one, job.device"
    elif made.mixed_precision is not None:
        reason = "was made with mixed_precision, which its own reduction does: use torch.autocast"
    elif made._comm_hooks or _built_in_hook(made) or hasattr(made, "buffer_hook"):
        reason = "has a communication hook, which the job would not call: do not register one"
    if reason is not None:
        raise TypeError("DistributedDataParallel " + reason)


def _built_in_hook(ddp: DistributedDataParallel) -> bool:
    # Only its log knows of one that is written in C++.
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


def let_job_reduce(model: nn.Module) -> nn.Module:
    """Turn off what every wrapper in the model exchanges, for good; returns the model without the
    wrappers around it. Raises TypeError as ``check_wrapper``, before anything is changed.
    """
    live = [
        each
        for each in wrappers_in(model)
        if not isinstance(getattr(each, "reducer", None), _NoReducer)
    ]
    for each in live:
        check_wrapper(each)
    for each in live:
        _turn_off(each)
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def _turn_off(ddp: Any) -> None:
    ddp.reducer = ddp.logger = _NoReducer()
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False  # no buffers at forward
    ddp.join = _refuse_join
    ddp.find_unused_parameters = ddp.static_graph = False  # they prepare for the reduction


def _refuse_join(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "DistributedDataParallel.join() is for ranks with different numbers of steps, which a job"
        " does not have: leave it out"
    )
