"""The full training state of one rank: named tensors and a few scalars, which are stored and
copied.

The data position is the step itself (the sample order is a pure function of it), and random
generators are seeded anew at each step from (seed, rank, step), so a rank that dies takes nothing
with it that cannot be derived.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from trainchaos.recovery.data.exclusion_index import ExclusionIndex
from trainchaos.recovery.state import misuse, naming
from trainchaos.recovery.state.attempt import Attempt
from trainchaos.recovery.state.cell import Cell
from trainchaos.recovery.state.digest import Digester
from trainchaos.recovery.state.finite import NonFiniteCheck
from trainchaos.recovery.state.optimizer_state import OptimizerState, Slots
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.state.registered import MakeScheduler, Registered, Schedule, Scheduler
from trainchaos.recovery.state.strides import Progress, quiet


class TrainState:
    """Model, optimizer and scheduler seen as one state. Tensors are live references, loaded in
    place.

    ``optimizer`` is None where the model is yet to be sharded; ``adopt`` comes first then.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler: Scheduler | MakeScheduler | None,
        *,
        seed: int,
    ) -> None:
        self.model = model
        self.seed = seed
        self.step = 0
        self.skip = ExclusionIndex()
        self.last: list[float] = []  # what all ranks knew of the step applied last; see Job
        self.registered = Registered()
        self.attempt = Attempt(self)
        self.cell: Cell | None = None
        # while it is saved, restored or copied: what other ranks have of their own
        self.own: dict[str, Tensor] = {}
        # of what no step changes: the tensor when it was hashed, its version then, and its digest
        self.constant: dict[str, tuple[Tensor, int, int]] = {}
        self.room_for_own: Callable[[Mapping[str, Any]], dict[str, Tensor]] = lambda table: {}
        if optimizer is not None:
            self.adopt(optimizer, scheduler)

    def adopt(
        self,
        optimizer: Optimizer,
        scheduler: Scheduler | MakeScheduler | None,
        *,
        model: nn.Module | None = None,
        cell: Cell | None = None,
    ) -> None:
        """Use these from now on; ``optimizer`` gets its state, which is then received or restored.
        ``model``: another than before, where this rank has a stage; ``cell``: its place, where
        ranks compute the same samples.
        """
        self.model = model or self.model
        naming.require_tensors_only(self.model)
        self.cell = cell
        self.optimizer = optimizer
        # in the midst of a pass, a sharded model shows others
        self.trained = naming.named_parameters(self.model)
        self._slots = OptimizerState(optimizer, self.trained)
        self._schedule = Schedule(scheduler, optimizer)
        self._scheduled = self.scheduler_step()
        misuse.guard_optimizer(optimizer)

    @property
    def scheduler(self) -> Scheduler | None:
        """The one in use: a function that was given for it makes another for each load."""
        made: Scheduler | None = self._schedule.scheduler
        return made

    @property
    def partial(self) -> bool:
        """Whether this is a stage: a checkpoint of the job holds parameters that are not here."""
        return self.cell is not None and self.cell.partial

    def parts(self) -> dict[str, Tensor]:
        """``tensors``, of each the part that this rank holds."""
        return {name: local(tensor) for name, tensor in self.tensors().items()}

    def tensors(self, slots: Slots | None = None) -> dict[str, Tensor]:
        """Every tensor by name (``model.<parameter>``, ``optimizer.<parameter>.<slot>``), in fixed
        order; those of a sharded model are DTensors. ``slots``: the optimizer's as they are
        planned, instead of as they are.
        """
        named = {
            f"model.{name}": tensor for name, tensor in naming.named_tensors(self.model).items()
        }
        return named | self._slots.tensors(slots) | self.registered.tensors()

    def saved(self, slots: Slots | None = None) -> dict[str, Tensor]:
        """``tensors``, and what other ranks have of their own."""
        return self.tensors(slots) | self.own

    def besides(self) -> dict[str, Tensor]:
        """Tensors that the optimizer does not make: buffers of the model, and what the user has
        registered; of each the part that is held here. They may differ from rank to rank.
        """
        trained = {f"model.{name}" for name in self.trained}
        named = {f"model.{name}": one for name, one in naming.named_tensors(self.model).items()}
        kept = {name: tensor for name, tensor in named.items() if name not in trained}
        return {name: local(tensor) for name, tensor in (kept | self.registered.tensors()).items()}

    def sampled(self, most: int) -> dict[str, list[Tensor]]:
        """Of at most ``most`` trained parameters, spread evenly, what this rank holds: the value,
        and the optimizer's tensors. To name every tensor takes longer than to look at these.
        """
        every = -(-len(self.trained) // most) or 1
        chosen = {name: self.trained[name].detach() for name in list(self.trained)[::every]}
        slots = self._slots.tensors_of(chosen)
        return {
            "parameters": [*map(local, chosen.values())],
            "optimizer": [*map(local, slots.values())],
        }

    def scalars(self) -> dict[str, Any]:
        """The rest of the state, as JSON: step, seed, scheduler, all of the optimizer that is no
        tensor, which parameters are frozen, samples left out, and what all ranks knew of the last
        step.
        """
        return {
            "step": self.step,
            "seed": self.seed,
            "scheduler": self._schedule.scalars(),
            "optimizer": self._slots.scalars(),
            "frozen": [
                name for name, parameter in self.trained.items() if not parameter.requires_grad
            ],
            "skip": {str(sample): step for sample, step in self.skip.items()},
            "last": self.last,
            "registered": self.registered.scalars(),
        }

    def planned(self, scalars: Mapping[str, Any]) -> Slots:
        """Slots of the optimizer for the state that ``scalars`` is the rest of, to be filled before
        ``load_scalars``.

        Nothing live is changed. Raises ValueError for a state of another model.
        """
        return self._slots.planned(self._optimizer_of(scalars))

    def expected(self) -> Slots:
        """Slots of the optimizer as this process has made it; see ``planned``."""
        return self._slots.planned(self._slots.scalars() | {"state": self._slots.expected()})

    def load_scalars(self, scalars: Mapping[str, Any], slots: Slots | None = None) -> None:
        """Put back what ``scalars`` returned, tensors being in place; ``slots``: as planned, and
        filled.

        Raises KeyError on a foreign dictionary, ValueError on another seed.
        """
        if scalars["seed"] != self.seed:
            raise ValueError(
                f"state of seed {scalars['seed']} offered to a job of seed {self.seed}"
            )
        self.step = int(scalars["step"])
        self.skip = ExclusionIndex(
            {int(sample): int(step) for sample, step in scalars.get("skip", {}).items()}
        )
        self.last = [float(value) for value in scalars.get("last", [])]
        self.registered.load(scalars.get("registered", {}))
        self._schedule.load(scalars["scheduler"])
        self._scheduled = self.scheduler_step()
        saved = self._optimizer_of(scalars)
        self._slots.load(saved, slots or self._slots.planned(saved))
        for name in self.trained if "frozen" in scalars else ():
            self.trained[name].requires_grad_(name not in scalars["frozen"])

    def apply(self, loss: float) -> None:
        """Apply the gradients: one step of optimizer and scheduler. The caller counts it. ``loss``:
        of the step, the same on all ranks, for a scheduler that goes by it.
        """
        if self.scheduler_step() != self._scheduled:
            raise RuntimeError(
                "scheduler.step() was called by the script: step.commit() makes the scheduler's"
                " step"
            )
        self._slots.begin()
        with misuse.applying():
            self.optimizer.step()
            self._schedule.step(loss)
        self._scheduled = self.scheduler_step()
        self.registered.update()

    def seed_step(self, rank: int, step: int) -> None:
        """Seed every random generator a step may draw from; a pure function of (seed,
        rank, step).
        """
        digest = hashlib.blake2b(f"{self.seed}/{rank}/{step}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "big") >> 1
        if _accelerated():
            torch.manual_seed(value)
        # that would note each time, with a look at the whole stack, what to do once there is a GPU
        else:
            torch.default_generator.manual_seed(value)
        random.seed(value)
        numpy.random.seed(value & 0xFFFFFFFF)

    def optimizer_step(self) -> int | None:
        """Steps the optimizer itself has counted; None if it does not count."""
        return self._slots.steps()

    def scheduler_step(self) -> int | None:
        """Steps the scheduler itself has counted; None without one."""
        return self._schedule.steps()

    def digests(self, progress: Progress = quiet) -> dict[str, str]:
        """Of each part of the state 16 hexadecimal digits; of what this rank holds of it:
        ``parameters``, ``optimizer``, ``scheduler`` (with all of the optimizer that is no tensor),
        ``rng``, ``buffers`` where there are any, and ``registered.<name>``. They are taken where it
        is, on the training thread, at the speed of memory, with calls of ``progress``.
        """
        digester, trained = Digester(), {f"model.{name}" for name in self.trained}
        for name, tensor in self.parts().items():
            kind, _, rest = name.partition(".")
            part = {"user": f"registered.{rest.partition('.')[0]}", "optimizer": kind}.get(kind)
            digester.add(part or ("parameters" if name in trained else "buffers"), name, tensor)
        found = digester.digests(progress)
        for name, value in self.registered.scalars().items():
            part = f"registered.{name}"
            text = f"{found.get(part)} {json.dumps(value)}"
            found[part] = xxhash.xxh3_64_hexdigest(text.encode())
        rules = f"{self.rules_of_scheduler()}\n{self.rules_of_optimizer()}"
        none = dict.fromkeys(("parameters", "optimizer"), xxhash.xxh3_64().hexdigest())
        return {
            **none,
            **found,
            "scheduler": xxhash.xxh3_64_hexdigest(rules.encode()),
            "rng": xxhash.xxh3_64_hexdigest(f"{self.seed}/{self.step}".encode()),
        }

    def learned(self, names: Iterable[str]) -> list[str]:
        """Those of the parameters and the optimizer. What else there is may rightly hold an
        infinity: a mask in a buffer of the model, the best loss so far in what the user registered.
        """
        parameters = {f"model.{name}" for name in self.trained}
        return [name for name in names if name in parameters or name.startswith("optimizer.")]

    def not_finite(self) -> str | None:
        """The name of a ``learned`` tensor that holds a NaN or an infinity, or None. Waits once for
        a GPU.
        """
        flags, parts = {}, self.parts()
        for name in self.learned(parts):
            tensor = parts[name]
            if tensor.is_floating_point() or tensor.is_complex():
                flaws = NonFiniteCheck()
                flaws.look(tensor)
                flags[name] = flaws.flag()
        seen = {name: flag for name, flag in flags.items() if isinstance(flag, Tensor)}
        read = dict(zip(seen, torch.stack([*seen.values()]).tolist() if seen else [], strict=True))
        return next((name for name, flag in (flags | read).items() if flag), None)

    def rules_of_scheduler(self) -> str:
        """Its state; equal text for equal state."""
        return json.dumps(self._schedule.scalars(), sort_keys=True)

    def rules_of_optimizer(self) -> str:
        """All of its state that is no tensor; equal text for equal state."""
        return self._slots.rules()

    def _optimizer_of(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's part; of a checkpoint of before it was saved, this optimizer's with the
        learning rates that are there.
        """
        if "optimizer" in scalars:
            found = dict(scalars["optimizer"])
            return self._slots.only_mine(found) if self.partial else found
        mine = self._slots.scalars() | {"state": self._slots.expected()}
        for group, lr in zip(mine["groups"], scalars["lr"], strict=True):
            group["fields"]["lr"] = lr
        return mine


@cache
def _accelerated() -> bool:
    """Whether there are other generators than the host's."""
    return bool(torch.accelerator.is_available())
