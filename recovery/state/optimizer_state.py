"""The state of an optimizer as named tensors and JSON, whatever the optimizer keeps, and back in
place.

An optimizer's slots (``state[parameter]``) are described as a skeleton: the values that are not
tensors, typed, and in place of each tensor its type and shape. A process that receives the state
makes slots of that form first, of its own tensors where they fit, so that slots may appear at any
step, or never, as with a frozen parameter.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainchaos.recovery.state import typed
from trainchaos.recovery.state.finite import on_host
from trainchaos.recovery.state.parts import is_part, local, wrapped

COMPUTED_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Fields of parameter groups that say how this process computes, and nothing of the job's state."""

MOST_FORMS = 4096  # of slots, that are remembered: more than a model has shapes


@dataclass(kw_only=True)
class Slots:
    """Slots about to be filled. ``by_parameter``: name -> what is to be
    ``optimizer.state[parameter]``; ``tensors``: all of theirs by name, in the order of every rank.
    """

    by_parameter: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class OptimizerState:
    """``trained``: the model's parameters by name. Raises TypeError for an optimizer that cannot be
    used here.
    """

    def __init__(self, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self._trained = dict(trained)
        # of slots, by their form: as JSON, and the text of that
        self._known: dict[Any, tuple[Any, str]] = {}
        self._names = {id(parameter): name for name, parameter in self._trained.items()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in self._names for parameter in group["params"]):
                raise TypeError(
                    "the optimizer trains a tensor that is no parameter of the model, so that its"
                    " gradients would not be reduced and its value not be saved: make it a part of"
                    " the model that is attached"
                )
        made = {} if optimizer.state else _made_up(optimizer)
        self._ready_made = {
            self._names[id(p)]: slots for p, slots in made.items() if id(p) in self._names
        }
        self._made = sorted(
            {slot for slots in (made or optimizer.state).values() for slot in slots}
        )
        self._built = len(optimizer.param_groups)
        more = set(optimizer.state_dict()) - {"state", "param_groups"}
        if more:
            raise TypeError(
                f"{type(optimizer).__name__} keeps {', '.join(sorted(more))} in its state_dict()"
                " besides state and parameter groups, which would not be saved: keep it there, or"
                " in an object given to job.register"
            )
        self.scalars()

    def tensors(self, slots: Slots | None = None) -> dict[str, Tensor]:
        """Every tensor of the slots by name (``optimizer.<parameter>.<slot>``), live, in an order
        that is the same on every rank.
        """
        if slots is not None:
            return slots.tensors
        return self._named({name: self._slots_of(name) for name in self._trained})

    def tensors_of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of ``tensors`` that belong to some parameters, without a look at the others."""
        named: dict[str, Tensor] = {}
        for name in names:
            _collect(self._slots_of(name), f"optimizer.{name}", named)
        return named

    def scalars(self) -> dict[str, Any]:
        """The rest of the optimizer's state, as JSON: type, names of the slots that it makes at
        first, parameter groups with every field, how many there were when it was attached, and the
        skeleton.

        Raises TypeError, naming the place, for what can be neither saved nor copied.
        """
        held = {name: self._slots_of(name) for name in self._trained}
        return {**self._besides(), "state": self._skeleton(held)}

    def _besides(self) -> dict[str, Any]:
        """All but the slots."""
        apart = {
            key: typed.encode(value, f"optimizer.state.{key}")
            for key, value in self.optimizer.state.items()
            if not isinstance(key, Tensor)
        }
        return {
            "type": type(self.optimizer).__name__,
            "groups": [
                self._group(place, group) for place, group in enumerate(self.optimizer.param_groups)
            ],
            "apart": apart,
            "made": self._made,
            "built": self._built,
        }

    def only_mine(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What ``scalars`` returned in several processes, put together, without the parameters that
        this one does not have.
        """
        groups = [
            {**group, "params": [name for name in group["params"] if name in self._trained]}
            for group in saved["groups"]
        ]
        state = {name: slots for name, slots in saved["state"].items() if name in self._trained}
        return {**saved, "groups": groups, "state": state}

    def rules(self) -> str:
        """The same as text, which is equal for equal state."""
        held = ((name, self._slots_of(name)) for name in self._trained)
        state = (
            f"{name}: {self._encoded(name, slots)[1]}" for name, slots in held if slots is not None
        )
        return "\n".join([json.dumps(self._besides(), sort_keys=True), *state])

    def planned(self, saved: Mapping[str, Any]) -> Slots:
        """Slots of the form that ``scalars`` described: this process's own tensors where type and
        shape are the same, which are then filled in place, and new ones otherwise. Nothing live is
        changed.

        Raises ValueError for what describes no slots of these parameters.
        """
        unknown = set(saved["state"]) - set(self._trained)
        if unknown:
            raise ValueError(f"the state is of a model with a parameter {sorted(unknown)[0]}")
        slots = {}
        for name in self._trained:
            if name in saved["state"]:
                live = self._slots_of(name) or self._ready_made.get(name)
                slots[name] = typed.decode(saved["state"][name], live, name, self._take)
        return Slots(by_parameter=slots, tensors=self._named(slots))

    def load(self, saved: Mapping[str, Any], slots: Slots) -> None:
        """Put back what ``scalars`` returned, with slots planned for it and filled. Raises
        ValueError.
        """
        state = self.optimizer.state
        state.clear()
        for name, found in slots.by_parameter.items():
            state[self._trained[name]] = found
        for key, value in saved["apart"].items():
            state[key] = typed.decode(value)  # type: ignore[index]
        groups = self.optimizer.param_groups
        while len(groups) < len(saved["groups"]):
            groups.append(
                {key: v for key, v in self.optimizer.defaults.items() if key in COMPUTED_HOW}
            )
        del groups[len(saved["groups"]) :]
        for group, there in zip(groups, saved["groups"], strict=True):
            self._load_group(group, there)

    def expected(self) -> dict[str, Any]:
        """The skeleton that a checkpoint is supposed to have which does not tell."""
        return self._skeleton(
            {name: self._slots_of(name) or self._ready_made.get(name) for name in self._trained}
        )

    def begin(self) -> None:
        """The optimizer is about to make a step, with slots of its own."""
        self._ready_made = {}

    def steps(self) -> int | None:
        """Steps the optimizer itself has counted; None if it does not count, or does it on a GPU,
        which is not waited for to know it.
        """
        for slots in self.optimizer.state.values():
            if isinstance(slots, Mapping) and "step" in slots:
                count = slots["step"]
                return None if isinstance(count, Tensor) and not on_host(count) else int(count)
        return None

    def _skeleton(self, slots: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._encoded(name, v)[0] for name, v in slots.items() if v is not None}

    def _encoded(self, name: str, slots: Any) -> tuple[Any, str]:
        """Slots as JSON, and the text of that. It is not worked out again for slots of the same
        form, which nearly all are, in each step: what is returned is not to be changed.
        """
        form = _form_of(slots)
        known = self._known.get(form) if form is not None else None
        if known is None:
            entry = typed.encode(slots, name, self._put)
            known = entry, json.dumps(entry, sort_keys=True)
            if form is not None and len(self._known) < MOST_FORMS:
                self._known[form] = known
        return known

    def _slots_of(self, name: str) -> Any:
        return self.optimizer.state.get(self._trained[name])

    def _group(self, place: int, group: Mapping[str, Any]) -> dict[str, Any]:
        fields = {
            key: typed.encode(value, f"param_groups.{place}.{key}")
            for key, value in group.items()
            if key != "params" and key not in COMPUTED_HOW
        }
        return {
            "params": [self._names[id(parameter)] for parameter in group["params"]],
            "fields": fields,
        }

    def _load_group(self, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
        group["params"] = [self._trained[name] for name in saved["params"]]
        for key in [key for key in group if key not in ("params", *COMPUTED_HOW, *saved["fields"])]:
            del group[key]
        for key, value in saved["fields"].items():
            here, there = group.get(key), typed.decode(value, group.get(key))
            if isinstance(here, Tensor) and isinstance(there, Tensor) and here.shape == there.shape:
                with torch.no_grad():
                    here.copy_(there)  # a captured graph or a compiled step refers to this tensor
            else:
                group[key] = there

    def _named(self, slots: Mapping[str, Any]) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for name in self._trained:
            _collect(slots.get(name), f"optimizer.{name}", named)
        return named

    def _put(self, tensor: Tensor, path: str) -> Any:
        entry: list[Any] = [typed.name_of(tensor.dtype), list(tensor.shape)]
        return {"!tensor": [*entry, "sharded"] if is_part(tensor) else entry}

    def _take(self, body: Any, path: str, live: Any) -> Tensor:
        name, shape, *sharded = body["!tensor"]
        dtype = typed.dtype_of(name)
        if isinstance(live, Tensor) and (live.dtype, list(live.shape), is_part(live)) == (
            dtype,
            shape,
            bool(sharded),
        ):
            return live.detach()
        parameter = self._trained[
            max((n for n in self._trained if path.startswith(f"{n}.")), key=len)
        ]
        if not sharded:
            return torch.zeros(shape, dtype=dtype, device=local(parameter).device)
        if list(parameter.shape) != shape:
            raise ValueError(
                f"{path} is spread over ranks otherwise than its parameter: it cannot be made anew"
            )
        return wrapped(torch.zeros_like(local(parameter).detach(), dtype=dtype), parameter)


def _form_of(slots: Any) -> tuple[Any, ...] | None:
    """What slots look like that are tensors alone, by name: all that is said of them. None: they
    are something else.
    """
    if type(slots) is not dict:
        return None
    if not all(
        type(key) is str and type(slot) in (Tensor, nn.Parameter) for key, slot in slots.items()
    ):
        return None
    return tuple([(key, slot.dtype, slot.shape) for key, slot in slots.items()])


def _collect(value: Any, path: str, named: dict[str, Tensor]) -> None:
    """Add each tensor in ``value`` to ``named``, by its path."""
    if isinstance(value, Tensor):
        named[path] = value.detach() if value.requires_grad else value
    elif type(value) is dict or isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _collect(value[key], f"{path}.{key}", named)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _collect(item, f"{path}.{place}", named)


def _made_up(optimizer: Optimizer) -> dict[Any, Any]:
    """Slots as the optimizer makes them, by parameter; neither it, nor a parameter, nor torch's
    random generators are changed, whatever its step does. Raises TypeError.

    They are memory to receive a state into, which takes a while to get, and this first step imports
    what any step needs: a spare does both before other ranks wait for it. It is a step with zero
    gradients. Its slots must not be trained with: what an optimizer's first step makes may differ
    from what a step with zeros has left.
    """
    fields = [copy.deepcopy(fields_of(group)) for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [parameter.detach().clone() for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    attributes = _plain_attributes(optimizer)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        # The undecorated step: a scheduler counts calls of the decorated one and would warn about
        # their order.
        with _generators_kept():
            type(optimizer).step(optimizer)
    except (TypeError, RuntimeError) as error:
        hint = (
            ": make it with foreach=False" if "mixed torch.Tensor and DTensor" in f"{error}" else ""
        )
        raise TypeError(
            f"{type(optimizer).__name__} cannot be used: its step is made without a closure and"
            f" with dense gradients, which it refuses ({error}){hint}"
        ) from error
    finally:
        for group, before in zip(optimizer.param_groups, fields, strict=True):
            put_fields(group, before)
        with torch.no_grad():
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                parameter.copy_(value)
                parameter.grad = gradient
    _refuse_hidden_state(optimizer, attributes)
    made = dict(optimizer.state)
    optimizer.state.clear()
    return made


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Torch's random generators are put back; of GPUs, the one in use."""
    cpu, gpu = torch.get_rng_state(), torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state() if gpu else cpu
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if gpu:
            torch.cuda.set_rng_state(cuda)


def fields_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says besides its parameters; tensors are copied."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def put_fields(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Have a parameter group say what it did. Tensors stay the same objects: a captured graph or a
    compiled step refers to them.
    """
    for key in [key for key in group if key != "params" and key not in before]:
        del group[key]
    for key, value in before.items():
        here = group.get(key)
        if isinstance(here, Tensor) and isinstance(value, Tensor) and here.shape == value.shape:
            with torch.no_grad():
                here.copy_(value)
        else:
            group[key] = value


def _plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float)}


def _refuse_hidden_state(optimizer: Optimizer, attributes: Mapping[str, Any]) -> None:
    """Raise TypeError where a step has changed what is in neither ``state`` nor a parameter
    group.
    """
    name = type(optimizer).__name__
    changed = [k for k, v in _plain_attributes(optimizer).items() if attributes.get(k) != v]
    if changed:
        raise TypeError(
            f"{name} keeps {changed[0]} in an attribute that its step changes, which would not be"
            " saved: keep it in a parameter group"
        )
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.state and value.state is not optimizer.state:
            raise TypeError(
                f"{name} keeps another optimizer ({key}) with its own state, which would not be"
                " saved: share one state between them, or attach that optimizer"
            )
