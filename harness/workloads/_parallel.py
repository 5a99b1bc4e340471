"""The transformer of ``gpt`` over a mesh: blocks cut by heads and columns, stages of blocks, and
parts of each sequence, whose attention gathers keys and values (as Llama 3 was trained: Grattafiori
et al., 2024, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from trainchaos.harness.workloads._transformer import Transformer
from trainchaos.recovery.data.order import share

PLAN = {
    "qkv": ColwiseParallel(),
    "project": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """This rank's part of the model, which is changed in place."""
    ranks = mesh["tensor"].size()
    blocks: list[Any] = [*model.blocks] if ranks > 1 else []
    for block in blocks:
        parallelize_module(block, mesh["tensor"], PLAN, src_data_rank=None)
        block.heads //= ranks
    model.part = mesh.get_local_rank("context")
    if mesh["context"].size() > 1:
        for block in model.blocks:
            block.gather = partial(_up_to_mine, mesh.get_group("context"))  # type: ignore[assignment]
    stages, stage = mesh["pipeline"].size(), mesh.get_local_rank("pipeline")
    mine = share(stage, stages, len(model.blocks))
    for place in range(len(model.blocks)):
        if place not in mine:
            model.blocks[place] = nn.Identity()  # names go by place
    model.first, model.last = stage == 0, stage == stages - 1
    if not model.first:
        model.positions = None  # type: ignore[assignment]
    if not model.last:
        model.norm = None  # type: ignore[assignment]
    if not (model.first or model.last):
        model.tokens = None  # type: ignore[assignment]
    return model


def part_of(mesh: DeviceMesh, length: int) -> slice:
    """The positions of a sequence that this rank has."""
    own = length // mesh["context"].size()
    first = own * mesh.get_local_rank("context")
    return slice(first, first + own)


def _up_to_mine(group: Any, own: Tensor) -> Tensor:
    """Keys and values of all positions up to this rank's last: no later ones are looked at."""
    parts: Tensor = _Gather.apply(own, group)  # type: ignore[no-untyped-call]
    return torch.cat([*parts[: group.rank() + 1]], dim=-2)


class _Gather(torch.autograd.Function):
    """One tensor of each rank, by rank; backward, each rank's gradients of all are summed where the
    tensor came from.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = own.new_empty((group.size(), *own.shape))
        group.all_gather_single(whole, own)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (whole,) = gradients
        own = whole.new_empty(whole.shape[1:])
        ctx.group.reduce_scatter_single(own, whole)
        return own, None


class Pipeline:
    """Runs a stage. ``loss_of``: the summed loss of logits and targets; ``between``: length and
    width of what goes from stage to stage.
    """

    def __init__(
        self,
        *,
        schedule: Literal["1f1b", "gpipe"],
        microbatches: int,
        between: tuple[int, int],
        vocabulary: int,
        loss_of: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._schedule = schedule
        self._microbatches = microbatches
        self._between = between
        self._vocabulary = vocabulary
        self._loss_of = loss_of
        self._made: tuple[tuple[int, int, int], Any] | None = None
        self._as_loss: Callable[[Tensor], Tensor] = lambda loss: loss

    def run(
        self,
        model: Transformer,
        mesh: DeviceMesh,
        inputs: Tensor,
        targets: Tensor,
        as_loss: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """See ``Step.run``. Samples are cut into the largest number of equal parts."""
        self._as_loss = as_loss
        inputs = inputs.contiguous()  # torch before 2.12 takes no parts of another stride
        # A new one says hello to the stages beside it: all have a new one in each generation.
        group: Any = mesh.get_group("pipeline")
        needed = group.generation, len(inputs), self._parts(mesh, inputs)
        made, self._made = self._made, None
        if made is None or made[0] != needed:
            made = needed, self._make(model, mesh, inputs, parts=needed[2])
        losses: list[Tensor] = []
        if model.last:
            made[1].step(*([inputs] if model.first else []), target=targets, losses=losses)
        elif model.first:
            made[1].step(inputs)
        else:
            made[1].step()
        self._made = made
        return torch.stack(losses).sum() if losses else torch.zeros((), device=inputs.device)

    def _parts(self, mesh: DeviceMesh, inputs: Tensor) -> int:
        """Into how many parts samples are cut. Ranks that share parameters gather them for each: if
        their samples do not cut alike, there is one.
        """
        size = len(inputs)
        if mesh["shard"].size() > 1:
            sizes = torch.tensor([size, -size], device=inputs.device)
            dist.all_reduce(sizes, dist.ReduceOp.MIN, group=mesh.get_group("shard"))
            least, most = sizes.tolist()
            if least != -most:
                return 1
        return next(n for n in range(min(size, self._microbatches), 0, -1) if size % n == 0)

    def _make(self, model: Transformer, mesh: DeviceMesh, inputs: Tensor, parts: int) -> Any:
        stages = mesh["pipeline"].size()
        size = len(inputs)
        between = torch.empty(size // parts, *self._between, device="meta", requires_grad=True)
        logits = torch.empty(
            size // parts, self._between[0], self._vocabulary, device="meta", requires_grad=True
        )
        stage = PipelineStage(
            model,
            mesh.get_local_rank("pipeline"),
            stages,
            inputs.device,
            input_args=inputs[: size // parts].to("meta") if model.first else between,
            output_args=logits if model.last else between,
            group=mesh.get_group("pipeline"),
        )
        # 1F1B is for as many parts as there are stages or more
        kind = Schedule1F1B if self._schedule == "1f1b" and parts >= stages else ScheduleGPipe
        return kind(stage, parts, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._as_loss(self._loss_of(logits, targets))
