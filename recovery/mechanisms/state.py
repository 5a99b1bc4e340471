"""The full training state of one rank: named tensors and a few scalars, which are stored and copied.

The data position is the step itself (the sample order is a pure function of it), and random generators are
seeded anew at each step from (seed, rank, step), so a rank that dies takes nothing with it that cannot be
derived.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recovery.mechanisms.parts import local
from recovery.mechanisms.registered import Registered


class TrainState:
    """Model, optimizer and scheduler seen as one state. Tensors are live references, loaded in place.

    ``optimizer`` is None where the model is yet to be sharded; ``adopt`` comes first then.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None, *, seed: int
    ) -> None:
        self.model = model
        self.seed = seed
        self.step = 0
        self.skip: dict[int, int] = {}  # samples left out, each with the first step without it
        self.last: list[float] = []  # what all ranks knew of the step applied last; see Job
        self.scheduler = scheduler
        self.registered = Registered()
        if optimizer is not None:
            self.adopt(optimizer, scheduler)

    def adopt(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        """Use these from now on; ``optimizer`` gets its state, which is then received or restored."""
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.trained = dict(
            self.model.named_parameters()
        )  # in the midst of a pass, a sharded model shows others
        self._made_up = not optimizer.state  # some optimizers make their state at once, as it has to be
        _materialise(optimizer)

    def parts(self) -> dict[str, Tensor]:
        """``tensors``, of each the part that this rank holds."""
        return {name: local(tensor) for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name (``model.<parameter>``, ``optimizer.<parameter>.<slot>``), in fixed order; those of a
        sharded model are DTensors."""
        named = {f"model.{name}": t.detach() for name, t in self.model.state_dict(keep_vars=True).items()}
        for name, parameter in self.trained.items():
            for slot, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    named[f"optimizer.{name}.{slot}"] = value
        return named | self.registered.tensors()

    def scalars(self) -> dict[str, Any]:
        """The rest of the state, JSON-compatible: step, seed, scheduler, learning rates, samples left out, and what all
        ranks knew of the last step."""
        return {
            "step": self.step,
            "seed": self.seed,
            "scheduler": self._scheduler_scalars(),
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "skip": {str(sample): step for sample, step in self.skip.items()},
            "last": self.last,
            "registered": self.registered.scalars(),
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Put back what ``scalars`` returned.

        Raises KeyError on a foreign dictionary, ValueError on another seed.
        """
        if scalars["seed"] != self.seed:
            raise ValueError(f"state of seed {scalars['seed']} offered to a job of seed {self.seed}")
        self.step = int(scalars["step"])
        self.skip = {int(sample): int(step) for sample, step in scalars.get("skip", {}).items()}
        self.last = [float(value) for value in scalars.get("last", [])]
        self.registered.load(scalars.get("registered", {}))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(scalars["scheduler"]))
        for group, lr in zip(self.optimizer.param_groups, scalars["lr"], strict=True):
            group["lr"] = lr

    def apply(self) -> None:
        """Apply the gradients: one step of optimizer and scheduler. The caller counts it."""
        if self.step == 0 and self._made_up:
            # Its first step makes its own state, which may differ from what _materialise left.
            self.optimizer.state.clear()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.registered.update()

    def seed_step(self, rank: int, step: int) -> None:
        """Seed every random generator a step may draw from; a pure function of (seed, rank, step)."""
        digest = hashlib.blake2b(f"{self.seed}/{rank}/{step}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "big") >> 1
        torch.manual_seed(value)
        random.seed(value)
        numpy.random.seed(value & 0xFFFFFFFF)

    def optimizer_step(self) -> int | None:
        """Steps the optimizer itself has counted; None if it does not count."""
        for slots in self.optimizer.state.values():
            if "step" in slots:
                return int(slots["step"])
        return None

    def scheduler_step(self) -> int | None:
        """Steps the scheduler itself has counted; None without one."""
        return int(self.scheduler.last_epoch) if self.scheduler is not None else None

    def digests(self) -> dict[str, str]:
        """XXH3-64 of each part of the state, 16 hexadecimal digits; of what this rank holds of it. It is taken on the
        training thread, at the speed of memory."""
        parameters, optimizer = xxhash.xxh3_64(), xxhash.xxh3_64()
        for name, tensor in self.parts().items():
            part = parameters if name.startswith("model.") else optimizer
            part.update(name.encode())
            part.update(bytes_of(tensor))
        scalars = self.scalars()
        scheduler = xxhash.xxh3_64(repr((scalars["scheduler"], scalars["lr"])).encode())
        rng = xxhash.xxh3_64(f"{self.seed}/{self.step}".encode())
        parts = {"parameters": parameters, "optimizer": optimizer, "scheduler": scheduler, "rng": rng}
        return {name: part.hexdigest() for name, part in parts.items()}

    def not_finite(self) -> str | None:
        """The name of a tensor that holds a NaN or an infinity, or None."""
        for name, tensor in self.parts().items():
            # A finite sum proves it; only an infinite or NaN sum needs the full look.
            suspect = tensor.is_floating_point() and not torch.isfinite(tensor.sum())
            if suspect and not torch.isfinite(tensor).all():
                return name
        return None

    def _scheduler_scalars(self) -> dict[str, Any]:
        if self.scheduler is None:
            return {}
        # A LambdaLR's functions are code, not state; torch stores None for them.
        return {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"} | _lambdas(
            self.scheduler
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's raw bytes (copied to the CPU when it lives elsewhere); of a sharded one this rank's part."""
    flat = local(tensor).detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _lambdas(scheduler: LRScheduler) -> dict[str, Any]:
    functions = getattr(scheduler, "lr_lambdas", None)
    return {} if functions is None else {"lr_lambdas": [None] * len(functions)}


def _materialise(optimizer: Optimizer) -> None:
    """Make the optimizer create its state tensors now, without changing a parameter.

    A state that does not exist cannot be received. One step with zero gradients at learning rate 0 creates
    it (AdamW's decay is scaled by the learning rate); the step counters are then set back.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    saved = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    # The undecorated step: a scheduler counts calls of the decorated one and would warn about their order.
    type(optimizer).step(optimizer)
    for group, lr, gradients in zip(optimizer.param_groups, rates, saved, strict=True):
        group["lr"] = lr
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.grad = gradient
    for slots in optimizer.state.values():
        if isinstance(slots.get("step"), Tensor):
            slots["step"].zero_()
