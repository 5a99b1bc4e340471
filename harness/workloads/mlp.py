"""A multi-layer perceptron on a seeded regression problem: the smallest thing that trains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.launch.workload import BuildContext, DataInfo, Trainable, Workload
from trainchaos.harness.workloads._rules import Rules

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

FEATURES = 32
WIDTHS = {"nano": 64, "small": 512}


class Mlp(Rules, Workload):
    """Fits a fixed random non-linear function of 32 inputs; SGD with momentum, so it also shows an
    optimizer without AdamW's slots, unless ``optimizer`` or ``schedule`` name others. ``samples``:
    size of the data set.
    """

    size: Literal["nano", "small"] = "nano"
    samples: int = Field(default=8192, ge=16, le=1_000_000)
    lr: float = Field(default=0.02, gt=0)

    def prepare(self, directory: Path) -> DataInfo:
        """Write inputs and targets, float32, one row of 33 values a sample."""
        import numpy

        generator = numpy.random.default_rng(20260101)
        inputs = generator.standard_normal((self.samples, FEATURES)).astype(numpy.float32)
        weights = generator.standard_normal((FEATURES,)).astype(numpy.float32)
        targets = numpy.sin(inputs @ weights / 4)[:, None]
        rows = numpy.ascontiguousarray(
            numpy.concatenate([inputs, targets], axis=1, dtype=numpy.float32)
        )
        path = directory / "regression.f32"
        try:
            rows.tofile(path)
        except OSError as error:
            raise InfrastructureError(
                f"cannot write {path}: {error.strerror or error}", hint="free disk space"
            ) from error
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        return DataInfo(
            path=path, samples=self.samples, digest=digest, about=f"regression, {self.samples} rows"
        )

    def build(self, context: BuildContext) -> Trainable:
        """Build the model on the context's device."""
        return _trainable(self, context)

    def flops_per_sample(self) -> float:
        """Forward and twice that backward: 6 for each weight of a matrix product."""
        width = WIDTHS[self.size]
        return 6.0 * (FEATURES * width + width * width + width)

    def typical_step_s(self) -> float:
        return 0.004


def _trainable(spec: Mlp, context: BuildContext) -> Trainable:
    import numpy
    import torch
    from torch import nn

    torch.manual_seed(context.seed)
    width = WIDTHS[spec.size]
    model = nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
    ).to(context.device)
    rows = numpy.memmap(context.data, dtype=numpy.float32, mode="r").reshape(-1, FEATURES + 1)

    class MlpTrainable(Trainable):
        def __init__(self) -> None:
            self.model = model
            self.units = [layer for layer in model if isinstance(layer, nn.Linear)]

        def make_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
            named = spec.named_optimizer(parameters, spec.lr)
            return named or torch.optim.SGD(parameters, lr=spec.lr, momentum=0.9)

        def make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
            return spec.named_schedule(optimizer, context.steps)

        def load(self, samples: Sequence[int]) -> Any:
            """Rows of shape (samples, 33)."""
            return torch.from_numpy(rows[list(samples)]).to(context.device)

        def loss(self, batch: Any) -> Tensor:
            """Squared error, summed over samples."""
            return (model(batch[:, :-1]) - batch[:, -1:]).square().sum()

    return MlpTrainable()
