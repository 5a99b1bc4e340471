"""What a script attaches: a model, and an optimizer and a scheduler or how to make them.

A sharded model has other parameters than the one that was built, and which part of it a process
holds is not known before it gets a rank. Its optimizer is then made when that is known, and the
script says how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recovery.policy.layout import Layout
from recovery.state.state import TrainState

if TYPE_CHECKING:
    from recovery.collectives.sharded import ShardedReducer

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler | None]


def rehearse(shards: int, device: str) -> None:
    """Do once what sharding needs the first time only, before anybody waits for it."""
    from recovery.collectives import sharding

    sharding.rehearse(shards, device)


@dataclass(kw_only=True)
class Recipe:
    """``optimizer``, ``scheduler``: themselves, or made from the model's parameters and the
    optimizer; ``units``: what of a sharded model is gathered at once.
    """

    model: nn.Module
    optimizer: Optimizer | MakeOptimizer
    scheduler: LRScheduler | MakeScheduler | None
    units: Sequence[nn.Module] | None
    _shard: int | None = field(default=None, init=False)

    def check(self, *, shards: int) -> None:
        """Raise TypeError where the script has made what only the job can make, RuntimeError for a
        torch too old.
        """
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            raise TypeError(
                "attach the model itself, not DistributedDataParallel: the job reduces gradients"
            )
        if shards == 1:
            return
        from recovery.collectives.buckets import check_types
        from recovery.collectives.sharding import FSDPModule, require_torch

        require_torch()
        check_types(dict(self.model.named_parameters()))
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            raise TypeError(
                "attach the model before fully_shard: the job shards it once its rank is known"
            )
        if isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"the model is spread over {shards} ranks, which replaces its parameters: attach a"
                " function that makes the optimizer, as in optimizer=lambda parameters:"
                " AdamW(parameters)"
            )
        if isinstance(self.scheduler, LRScheduler):
            raise TypeError(
                "the optimizer is made by the job: attach a function that makes its scheduler, as"
                " in scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 100)"
            )

    def make(self) -> tuple[Optimizer, LRScheduler | None]:
        """Optimizer and scheduler of the model as it is now."""
        made = self.optimizer
        optimizer = made if isinstance(made, Optimizer) else made(list(self.model.parameters()))
        scheduler = self.scheduler
        if scheduler is None or isinstance(scheduler, LRScheduler):
            return optimizer, scheduler
        return optimizer, scheduler(optimizer)

    def take_part(
        self, rank: int, layout: Layout, *, state: TrainState, reducer: ShardedReducer, device: str
    ) -> bool:
        """Shard the model as this rank needs it; False if that was done before.

        Raises RuntimeError when the process holds another part already: it keeps it for life.
        """
        from recovery.collectives.sharding import default_units, shard_model

        shard = layout.shard_of(rank)
        if self._shard is not None:
            if shard != self._shard:
                raise RuntimeError(
                    f"this process holds shard {self._shard}, and is to be shard {shard}"
                )
            return False
        units = default_units(self.model) if self.units is None else self.units
        shard_model(
            self.model, units, shard=shard, shards=layout.shards, device=device, exchange=reducer
        )
        self._shard = shard
        state.adopt(*self.make())
        reducer.adopt()
        return True
