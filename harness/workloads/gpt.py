"""A small byte-level transformer language model trained on real text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field

from trainchaos.chaos.scenario.parallelism import MeshShape
from trainchaos.harness.host import corpus
from trainchaos.harness.launch.workload import BuildContext, DataInfo, Trainable, Workload
from trainchaos.harness.workloads._rules import Rules

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from trainchaos.harness.workloads._transformer import Transformer

VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shape of a model. ``typical_step_s``: seconds a step takes with 4 ranks on 2 cores, global
    batch 16.
    """

    layers: int
    heads: int
    width: int
    block: int
    typical_step_s: float


SIZES = {
    "nano": Size(layers=3, heads=4, width=96, block=64, typical_step_s=0.05),
    "micro": Size(layers=4, heads=4, width=192, block=128, typical_step_s=0.3),
    "mini": Size(layers=6, heads=6, width=384, block=256, typical_step_s=3.0),
    "124m": Size(layers=12, heads=12, width=768, block=1024, typical_step_s=120.0),
}


class Gpt(Rules, Workload):
    """Byte-level GPT (pre-norm, as GPT-2), deterministic; AdamW with linear warm-up and cosine
    decay, unless ``optimizer`` or ``schedule`` name others.

    ``data``: a file or folder; default: the source files of Python's standard library.
    """

    size: Literal["nano", "micro", "mini", "124m"] = "nano"
    data: str | None = None
    dropout: float = Field(default=0.1, ge=0, lt=1)
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    warmup: int = Field(default=20, ge=0, description="steps of linear warm-up")
    clip_norm: float = Field(default=1.0, ge=0)

    def prepare(self, directory: Path) -> DataInfo:
        """Write the corpus; a sample is a window of ``block`` bytes."""
        block = SIZES[self.size].block
        path = directory / "corpus.bin"
        size, digest, about = corpus.prepare(self.data, path, block=block)
        return DataInfo(path=path, samples=(size - 1) // block, digest=digest, about=about)

    def build(self, context: BuildContext) -> Trainable:
        """Build the model on the context's device."""
        return _trainable(self, SIZES[self.size], context)

    def misfit(self, mesh: MeshShape) -> str | None:
        """Heads are spread over tensor ranks, blocks over stages, positions over context ranks."""
        size = SIZES[self.size]
        if size.heads % mesh.tensor:
            return (
                f"the {size.heads} heads of gpt {self.size} do not divide by tensor {mesh.tensor}"
            )
        if size.block % mesh.context:
            return (
                f"the {size.block} positions of a sequence of gpt {self.size} do not divide by"
                f" context {mesh.context}"
            )
        if size.layers < mesh.pipeline:
            return (
                f"gpt {self.size} has {size.layers} layers, and pipeline {mesh.pipeline} would have"
                " stages without any"
            )
        return None

    def flops_per_sample(self) -> float:
        """Forward and twice that backward: 6 for each weight of a matrix product and token, 12 for
        each layer, position, token and width of attention (Chowdhery et al., "PaLM", 2022, appendix
        B; the causal mask is not taken off).
        """
        size = SIZES[self.size]
        weights = 12 * size.layers * size.width**2 + size.width * VOCABULARY
        return float(size.block * (6 * weights + 12 * size.layers * size.width * size.block))

    def typical_step_s(self) -> float:
        return SIZES[self.size].typical_step_s


def learning_rate(step: int, *, warmup: int, total: int) -> float:
    """Factor of the peak rate before step ``step`` (from 0): linear warm-up, then cosine decay to a
    tenth.

    Loshchilov and Hutter, "SGDR", 2017, without restarts.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


class _OnMesh(Trainable):
    """What cuts the model up, and runs a stage of it."""

    size: Size
    context: BuildContext
    mine = slice(None)  # the positions of a sequence that this rank has

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Blocks by heads and columns; stages of blocks; parts of sequences. The embedding is also
        the output's.
        """
        from trainchaos.harness.workloads import _parallel

        self._mesh = mesh
        self.mine = _parallel.part_of(mesh, self.size.block)
        self._pipeline = _parallel.Pipeline(
            schedule=self.context.schedule,
            microbatches=self.context.microbatches,
            between=(self.mine.stop - self.mine.start, self.size.width),
            vocabulary=VOCABULARY,
            loss_of=self.summed,
        )
        self._part = self.model = _parallel.parallelize(cast("Transformer", model), mesh)
        return self.model

    def passes(self, batch: Any, as_loss: Callable[[Tensor], Tensor]) -> Tensor:
        """All passes of this rank's stage."""
        inputs, targets = self.tokens(batch)
        return self._pipeline.run(self._part, self._mesh, inputs, targets, as_loss)

    def tokens(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank's part of each sequence."""
        return batch[:, :-1][:, self.mine], batch[:, 1:][:, self.mine]

    def summed(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats per byte, mean over the positions of a sequence, of which these may
        be a part, summed over samples.
        """
        from torch.nn import functional

        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / self.size.block


def _trainable(spec: Gpt, size: Size, context: BuildContext) -> Trainable:
    import numpy
    import torch

    from trainchaos.harness.workloads._transformer import Transformer

    torch.manual_seed(context.seed)
    model = Transformer(
        vocabulary=VOCABULARY,
        layers=size.layers,
        heads=size.heads,
        width=size.width,
        block=size.block,
        dropout=spec.dropout,
    ).to(context.device)
    text = numpy.memmap(context.data, dtype=numpy.uint8, mode="r")

    class GptTrainable(_OnMesh):
        clip_norm = spec.clip_norm

        def __init__(self) -> None:
            self.model, self.size, self.context = model, size, context

        def make_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
            decayed = [p for p in parameters if p.ndim >= 2]
            plain = [p for p in parameters if p.ndim < 2]
            groups = [
                {"params": decayed, "weight_decay": spec.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ]
            named = spec.named_optimizer(groups, spec.lr)
            # torch fuses parameters of one mesh, or of none
            fused = len({getattr(p, "device_mesh", None) for p in parameters}) == 1
            return named or torch.optim.AdamW(groups, lr=spec.lr, betas=(0.9, 0.95), fused=fused)

        def make_scheduler(self, optimizer: Optimizer) -> LRScheduler:
            return spec.named_schedule(
                optimizer, context.steps
            ) or torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: learning_rate(step, warmup=spec.warmup, total=context.steps)
            )

        def load(self, samples: Sequence[int]) -> Any:
            """Tokens of shape (samples, block + 1), int64."""
            windows = [text[i * size.block : i * size.block + size.block + 1] for i in samples]
            return torch.from_numpy(numpy.stack(windows).astype(numpy.int64)).to(context.device)

        def loss(self, batch: Any) -> Tensor:
            """Cross-entropy in nats per byte, mean over positions, summed over samples."""
            inputs, targets = self.tokens(batch)
            return self.summed(model(inputs), targets)

    return GptTrainable()
