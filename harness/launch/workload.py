"""What a workload offers: data prepared once per run, and in each rank a model with its optimizer
and loss.

A workload is one file in ``harness/workloads``: a pydantic model of its YAML parameters. Only its
functions import torch, so that listing and validating stay fast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.scenario.parallelism import MeshShape

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """Prepared data: ``samples`` of them in ``path``; ``digest`` identifies the content; ``about``
    is for reports.

    ``fixed``: fields of the scenario's workload that the workload fixes itself, by name
    (``steps``).
    """

    path: Path
    samples: int
    digest: str
    about: str
    fixed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program that does its own training: file and arguments."""

    path: Path
    args: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Inputs of ``build`` in a rank. ``device``: ``cpu`` or ``cuda:<index>``; ``schedule``,
    ``microbatches``: of a pipeline.
    """

    data: Path
    device: str
    seed: int
    steps: int
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    microbatches: int = 4


class Trainable:
    """A built workload in a rank; subclasses compute the loss.

    ``clip_norm``: gradient norm limit, 0 for none. ``parameters``: number of trained values.
    ``units``: modules that are gathered one at a time if the model is sharded (None: the children
    of each ModuleList).
    """

    model: nn.Module
    clip_norm: float = 0.0
    units: Sequence[nn.Module] | None = None

    def make_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters: the model's, or this rank's shards of them."""
        raise TypeError(f"{type(self).__name__} has no optimizer")

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The scheduler of the optimizer, or None."""
        return None

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer of the model, made on first access."""
        return self.make_optimizer(list(self.model.parameters()))

    @cached_property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler of ``optimizer``."""
        return self.make_scheduler(self.optimizer)

    def load(self, samples: Sequence[int]) -> Any:
        """The data phase: fetch these samples; the result goes to ``loss``."""
        raise TypeError(f"{type(self).__name__} does not load samples")

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The model cut up for this rank of a mesh, or its stage; see ``Job.attach``."""
        raise TypeError(f"{type(self).__name__} cannot be cut up")

    def passes(self, batch: Any, as_loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Of a stage: all forward and backward passes; see ``Step.run``."""
        raise TypeError(f"{type(self).__name__} has no stages")

    def loss(self, batch: Any) -> Tensor:
        """The forward phase: the *sum* over the batch of each sample's mean loss, a scalar."""
        raise TypeError(f"{type(self).__name__} has no loss")

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.model.parameters())


class Workload(BaseModel):
    """Base of a workload; its fields are its YAML parameters.

    ``cuts_batches``: its loop iterates over ``step.batches()``, as the harness's own does, so that
    it can have elastic sums.
    """

    cuts_batches: ClassVar[bool] = True

    def misfit(self, mesh: MeshShape) -> str | None:
        """Why its model cannot be cut up like that."""
        kind = type(self).__name__.lower()
        return None if mesh.alike == 1 else f"{kind} has no tensor, context or pipeline parallelism"

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def prepare(self, directory: Path) -> DataInfo:
        """Prepare the data in ``directory``, once per run. Raises ScenarioError if it cannot be
        used.
        """

    @abstractmethod
    def build(self, context: BuildContext) -> Trainable:
        """Build model, optimizer and scheduler, the same on every rank for the same seed."""

    def program(self) -> Program | None:
        """A script to run in each rank instead of ``build`` and the harness's own loop, or None."""
        return None

    def flops_per_sample(self) -> float | None:
        """Floating-point operations to train on one sample by the model's formula, forward and
        backward; None if unknown.
        """
        return None

    def typical_step_s(self) -> float:
        """A rough step time in seconds on two cores with four ranks, for estimates shown before a
        run.
        """
        return 0.05
