"""The full training state of one rank: named tensors and a few scalars, which are stored and
copied.

The data position is the step itself (the sample order is a pure function of it), and random
generators are seeded anew at each step from (seed, rank, step), so a rank that dies takes nothing
with it that cannot be derived.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from trainchaos.recovery.data.exclusion_index import ExclusionIndex
from trainchaos.recovery.state import misuse, naming
from trainchaos.recovery.state.cell import Cell
from trainchaos.recovery.state.digest import Digester
from trainchaos.recovery.state.finite import Amount, NonFiniteCheck, all_finite, on_host
from trainchaos.recovery.state.optimizer_state import OptimizerState, Slots, fields_of, put_fields
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.state.registered import (
    Held,
    MakeScheduler,
    Registered,
    Schedule,
    Scheduler,
    same_bits,
)
from trainchaos.recovery.state.strides import Progress, quiet

SMALL_BYTES = 64 << 10  # of a buffer, or a tensor of the script's, that is copied in each attempt
LEARNED_BYTES = 256 << 20  # copied in the first attempts, of all tensors together
LEARNING = 2  # attempts
SAMPLED = 64  # values of a tensor that is not copied meanwhile
_CHECKED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


@dataclass(eq=False)
class _Watched:
    """``buffer``: it is one of the model's, ``small``: copied in each attempt; ``changes``: it has
    changed in one; ``looks``: attempts in which it was compared; ``version``, ``sample``: as the
    attempt began.
    """

    tensor: Tensor
    buffer: bool
    small: bool
    changes: bool = False
    looks: int = 0
    copied: bool = False
    version: int = 0
    sample: Tensor | None = None

    def values(self) -> Tensor:
        """Some of them."""
        flat = self.tensor.detach().reshape(-1)
        return flat[:: -(-flat.numel() // SAMPLED) or 1].clone()


class Attempt:
    """The state with which an attempt at a step began, to be put back when the step is done again.
    Used by the training thread.

    A forward pass changes more than gradients: statistics, counters, codebooks, what the script has
    registered, parameters that the optimizer does not train, a learning rate that the loop sets.
    Until a step is applied none of it has happened. Random generators are seeded anew in each step
    and need no copy.

    What changes is learned, so that what does not is not copied. A small buffer is copied at each
    beginning. In the job's first steps all else is copied too, as far as ``LEARNED_BYTES`` go, and
    later only what has changed in one. Of what is not copied meanwhile, some values are compared.
    After that torch's count of changes tells whether a tensor has changed after all: it is copied
    from then on, and if that very attempt is lost, the state cannot be put back and is given up. A
    process that joins later does none of that in its first attempt, for which other ranks wait.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._of: nn.Module | None = None
        self._modules: list[nn.Module] = []
        self._named: list[nn.Parameter] = []
        self._parameters: list[_Watched] = []  # of each what is held here
        self._others: list[_Watched] = []
        self._copies = _Copies(())
        self._learning: list[_Watched] = []  # to be compared
        self._settled: list[_Watched] = []  # known not to change: torch's counts are looked at
        self._quiet: list[Tensor] = []  # of these
        self._versions: list[int] = []
        self._held = Held(states={}, rest={})
        self._slots: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._fields: list[dict[str, Any]] = []
        self._trains: list[bool] = []
        self._under_way = self._looked = self._beyond = False
        self._awaited: bool | None = None  # it is the first attempt of a process that joined later

    def begin(self) -> None:
        """An attempt begins with the state as it is now."""
        state = self._state
        self._awaited = self._awaited is None and state.step >= LEARNING
        if self._of is not (model := state.model):
            self._of, self._modules = model, [*model.modules()]
            self._named = [*model.parameters()]
            self._parameters = [_Watched(local(p), buffer=False, small=False) for p in self._named]
            self._copies.current = False
        self._slots = [(held, dict(held)) for module in self._modules if (held := module._buffers)]
        self._held = state.registered.held()
        self._fields = [fields_of(group) for group in state.optimizer.param_groups]
        self._trains = [parameter.requires_grad for parameter in self._named]
        self._watch()
        self._versions = [tensor._version for tensor in self._quiet]
        with torch.no_grad():
            self._copies.take()
            for one in self._learning:
                one.version = one.tensor._version
                if not (one.copied or self._awaited):
                    one.sample = one.values()
        self._under_way, self._looked, self._beyond = True, False, False

    def applied(self) -> None:
        """The gradients are about to be applied: what the attempt has changed is to stay."""
        self._look()
        self._under_way = False

    def whole(self) -> bool:
        """Whether all that the attempt has changed can be put back, or need not be."""
        self._look()
        return not (self._under_way and self._beyond)

    def unchanged(self) -> set[int]:
        """Where the tensors are (``data_ptr``) that no attempt changes, as far as is known."""
        return {one.data_ptr() for one in self._quiet}

    def undo(self) -> None:
        """Put back what it has changed, unless it was applied. Raises LoadError."""
        if not self._under_way:
            return
        self._look()
        self._under_way = False
        had = {id(now) for now, _ in self._slots}
        for now, then in self._slots:
            if [*map(id, now.values())] != [*map(id, then.values())]:
                now.clear()
                now.update(then)
        for module in self._modules:
            if id(module._buffers) not in had:
                module._buffers.clear()
        state = self._state
        with torch.no_grad():
            self._copies.put_back()
        groups = state.optimizer.param_groups
        del groups[len(self._fields) :]
        for group, before in zip(groups, self._fields, strict=True):
            put_fields(group, before)
        for parameter, trains in zip(self._named, self._trains, strict=True):
            parameter.requires_grad_(trains)
        state.registered.put_back(self._held)

    def spoilt(self) -> Amount:
        """NaN where a buffer of the model that is known to change has become NaN or infinite in
        this attempt, else 0. On a GPU it is not waited for.
        """
        replaced = [
            (now.get(name), then.get(name))
            for now, then in self._slots
            for name in now
            if now[name] is not then.get(name)
        ]
        if not replaced and not self._copies.buffers:
            return 0.0
        flaws = NonFiniteCheck()
        with torch.no_grad():
            self._copies.look(flaws)
            for buffer, before in replaced:
                if buffer is None or buffer.dtype not in _CHECKED:
                    continue
                buffer, before = local(buffer), None if before is None else local(before)
                if before is None or before.shape != buffer.shape:
                    flaws.look(buffer.detach())
                else:
                    flaws.look(torch.where(before.isfinite(), buffer.detach(), 0.0))
        flag = flaws.flag()
        if isinstance(flag, Tensor):
            return torch.where(flag > 0, math.nan, 0.0)
        return math.nan if flag else 0.0

    def _watch(self) -> None:
        """Choose what is copied. Nothing is to be done where that is as in the last attempt."""
        buffers = _changeable(one for _, held in self._slots for one in held.values())
        others = [*buffers, *_changeable(self._held.tensors())]
        if [*map(id, others)] == [id(one.tensor) for one in self._others] and self._copies.fit():
            return
        known = {id(one.tensor): one for one in self._others}
        self._others = [
            known.get(id(one))
            or _Watched(one, buffer=place < len(buffers), small=one.nbytes <= SMALL_BYTES)
            for place, one in enumerate({id(one): one for one in others}.values())
        ]
        room, copied = LEARNED_BYTES, []
        watched = (*self._others, *self._parameters)
        for one in sorted(watched, key=lambda one: one.tensor.nbytes):
            fits = self._state.step < LEARNING > one.looks and one.tensor.nbytes <= room
            one.copied = one.small or one.changes or fits
            if one.copied:
                copied.append(one)
                room -= one.tensor.nbytes
        self._copies = _Copies(copied)
        learns = [one for one in watched if not (one.small or one.changes)]
        self._learning = [one for one in learns if one.looks < LEARNING]
        self._settled = [one for one in learns if one.looks >= LEARNING]
        self._quiet = [one.tensor for one in self._settled]

    def _look(self) -> None:
        """Once in an attempt: note what it has changed."""
        if self._looked or not self._under_way:
            return
        self._looked = True
        if self._versions != [tensor._version for tensor in self._quiet]:
            for one, version in zip(self._settled, self._versions, strict=True):
                one.changes = one.tensor._version != version
            self._beyond, self._copies.current = True, False
        with torch.no_grad():
            changed = self._copies.changed() if self._learning else set[int]()
            for one in self._learning:
                # written to, even if to no effect this time
                one.changes = one.tensor._version != one.version or id(one) in changed
                if one.sample is not None:
                    one.changes = one.changes or not same_bits(one.sample, one.values())
                    one.sample = None
                self._beyond = self._beyond or (one.changes and not one.copied)
                one.looks += not self._awaited
                learns = one.looks < LEARNING
                if one.copied != (one.changes or learns) or not learns:
                    self._copies.current = False


def _changeable(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """This rank's parts. Torch lets nobody change a tensor made in inference mode outside of it."""
    return [local(one) for one in tensors if one is not None and not one.is_inference()]


@dataclass
class _Flat:
    """Tensors of one type and device, one after the other."""

    watched: list[_Watched] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    copy: Tensor | None = None


class _Copies:
    """Copies of tensors. ``current``: of those that are to be copied; ``buffers``: some are buffers
    that may become NaN.
    """

    def __init__(self, watched: Sequence[_Watched]) -> None:
        self.current = True
        self._places = [(one.tensor, one.tensor.data_ptr()) for one in watched]
        self._flats: dict[tuple[bool, torch.device, torch.dtype], _Flat] = defaultdict(_Flat)
        self._apart: list[tuple[_Watched, Tensor]] = []
        for one in watched:
            tensor = one.tensor.detach()
            if tensor.layout is torch.strided and tensor.is_contiguous():
                flat = self._flats[one.buffer, tensor.device, tensor.dtype]
                flat.watched.append(one)
                flat.shapes.append(tensor.shape)
                flat.views.append(tensor.view(-1))
            else:
                self._apart.append((one, tensor.clone()))
        self.buffers = any(buffer and dtype in _CHECKED for buffer, _, dtype in self._flats)

    def fit(self) -> bool:
        """Whether they are current, and each tensor is where it was."""
        return self.current and all(tensor.data_ptr() == at for tensor, at in self._places)

    def take(self) -> None:
        """Copy the tensors as they are now."""
        for flat in self._flats.values():
            flat.copy = torch.cat(flat.views, out=flat.copy)
        for one, copy in self._apart:
            copy.copy_(one.tensor)

    def put_back(self) -> None:
        """Give each tensor the values of its copy."""
        for one, copy in self._all():
            tensor = one.tensor.detach()
            if tensor.shape == copy.shape:
                tensor.copy_(copy)
            else:
                one.tensor.data = copy.clone()

    def changed(self) -> set[int]:
        """Which of them differ from their copies, by ``id``."""
        return {id(one) for one, copy in self._all() if not same_bits(one.tensor, copy)}

    def look(self, flaws: NonFiniteCheck) -> None:
        """Check the values of buffers that were finite when they were copied."""
        for (buffer, _, dtype), flat in self._flats.items():
            if buffer and dtype in _CHECKED and flat.copy is not None:
                now = torch.cat(flat.views)
                if not on_host(now) or not all_finite(now):
                    flaws.look(torch.where(flat.copy.isfinite(), now, 0.0))

    def _all(self) -> list[tuple[_Watched, Tensor]]:
        found = [*self._apart]
        for flat in self._flats.values():
            if flat.copy is None:
                continue
            pieces = flat.copy.split([view.numel() for view in flat.views])
            for one, shape, piece in zip(flat.watched, flat.shapes, pieces, strict=True):
                found.append((one, piece.view(shape)))
        return found


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
