"""With which optimizer and learning-rate schedule a built-in workload trains: its own, or those a
scenario names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class Rules(BaseModel):
    """Parameters of a workload that trains; none of them named, it trains as it always does."""

    optimizer: Literal["adam", "adamw", "nadam", "radam", "rmsprop", "sgd"] | None = Field(
        default=None, description="of torch, by name; default: the workload's own"
    )
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="of the optimizers sgd and rmsprop"
    )
    schedule: Literal["constant", "cosine", "cyclic", "one-cycle", "step"] | None = Field(
        default=None,
        description=(
            "of torch, by name; one-cycle and cyclic change momentum or betas too; default: the"
            " workload's own"
        ),
    )

    def named_optimizer(self, groups: Any, lr: float) -> Optimizer | None:
        """The optimizer that is named. ``groups``: parameters, or groups of them."""
        from torch import optim

        if self.optimizer is None:
            return None
        kinds: dict[str, Any] = {
            "adam": optim.Adam,
            "adamw": optim.AdamW,
            "nadam": optim.NAdam,
            "radam": optim.RAdam,
            "rmsprop": optim.RMSprop,
            "sgd": optim.SGD,
        }
        more: dict[str, Any] = (
            {"momentum": self.momentum} if self.optimizer in ("sgd", "rmsprop") else {}
        )
        made: Optimizer = kinds[self.optimizer](groups, lr=lr, **more)
        return made

    def named_schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """The schedule that is named, over a job of so many steps."""
        from torch.optim import lr_scheduler

        rates = [group["lr"] for group in optimizer.param_groups]
        first = optimizer.param_groups[0]
        cycles = bool(first.get("betas") or first.get("momentum"))
        match self.schedule:
            case "one-cycle":
                return lr_scheduler.OneCycleLR(
                    optimizer, rates, total_steps=steps + 1, cycle_momentum=cycles
                )
            case "cyclic":
                low, up = [rate / 10 for rate in rates], max(1, steps // 6)
                return lr_scheduler.CyclicLR(
                    optimizer, low, rates, step_size_up=up, cycle_momentum=cycles
                )
            case "cosine":
                return lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
            case "step":
                return lr_scheduler.StepLR(optimizer, step_size=max(1, steps // 3))
            case "constant":
                return lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return None
