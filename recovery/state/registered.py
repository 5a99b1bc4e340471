"""Objects of the script's that have state: its scheduler, and what it registers, such as an average
of the weights, a curriculum, counters, random generators.

It is saved, restored and copied with the model: tensors as tensors, and what else there is typed
(``recovery.state.typed``). A load has to replace: what an object then holds is compared with what
it was given.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainchaos.recovery.state import typed

Generator = torch.Generator | random.Random | numpy.random.Generator


class Stateful(Protocol):
    """Tensors in ``state_dict``, but for those in lists, are the object's own, not copies."""

    def state_dict(self) -> Mapping[str, Any]:
        """Nested mappings of tensors, and values that ``recovery.state.typed`` knows."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Put back what ``state_dict`` returned, in place of what is there."""


class LoadError(RuntimeError):
    """A ``load_state_dict`` did not give back what it was given: the state is not to be trusted."""


class Attributes:
    """Attributes of an object as state to register, such as counters of a module that are in no
    ``state_dict``. Raises AttributeError for a name that it does not have.
    """

    def __init__(self, of: Any, *names: str) -> None:
        self._of, self._names = of, names
        self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Their values by name."""
        return {name: getattr(self._of, name) for name in self._names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set them."""
        for name in self._names:
            setattr(self._of, name, state_dict[name])


class _Generator:
    """The state of a random generator."""

    def __init__(self, of: Generator) -> None:
        self._of = of

    def state_dict(self) -> dict[str, Any]:
        of = self._of
        if isinstance(of, torch.Generator):
            return {"state": of.get_state().numpy()}
        if isinstance(of, random.Random):
            version, words, gauss = of.getstate()
            return {"state": (version, numpy.array(words, dtype=numpy.uint32), gauss)}
        return {"state": dict(of.bit_generator.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        of, state = self._of, state_dict["state"]
        if isinstance(of, torch.Generator):
            of.set_state(torch.from_numpy(state))
        elif isinstance(of, random.Random):
            of.setstate((state[0], tuple(state[1].tolist()), state[2]))
        else:
            of.bit_generator.state = state


@dataclass(kw_only=True)
class _Entry:
    """``make``: makes the object anew for each load, where the script gave a function."""

    thing: Stateful
    make: Callable[[], Stateful] | None
    update: Callable[..., object] | None


@dataclass(kw_only=True)
class Held:
    """What objects held at a moment: their tensors, by object, and all else, encoded."""

    states: dict[str, dict[str, Any]]
    rest: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [tensor for state in self.states.values() for tensor in _own(state)]


class Registered:
    """Objects by name."""

    def __init__(self) -> None:
        self._things: dict[str, _Entry] = {}

    def __bool__(self) -> bool:
        return bool(self._things)

    def __getitem__(self, name: str) -> Stateful:
        return self._things[name].thing

    def add(
        self,
        name: str,
        thing: Stateful | Callable[[], Stateful] | Generator,
        update: Callable[..., object] | None,
    ) -> None:
        """Raises ValueError for a name that is taken, TypeError for state that cannot be stored or
        copied, LoadError where a load does not replace what is there.
        """
        if not name.isidentifier() or name in self._things:
            raise ValueError(
                f"{name!r} is {'registered already' if name in self._things else 'no identifier'}"
            )
        entry = _entry_of(name, thing, update)
        state = entry.thing.state_dict()
        again, tensors = dict(_tensors(entry.thing.state_dict())), [*_tensors(state)]
        for key, tensor in tensors:
            if again[key].data_ptr() != tensor.data_ptr():
                raise TypeError(f"{name}.{key} is copied by state_dict(): return the tensor itself")
        if len(again) < len(tensors):
            raise TypeError(f"the state of {name} has two tensors of one name")
        _load(name, entry, typed.round_trip(_rest(state), name), _only_tensors(state))
        self._things[name] = entry

    def update(self) -> None:
        """After an optimizer step."""
        for entry in self._things.values():
            if entry.update is not None:
                entry.update(*([entry.thing] if entry.make is not None else []))

    def tensors(self) -> dict[str, Tensor]:
        """By name (``user.<name>.<key>``), live."""
        return {
            f"user.{name}.{key}": tensor
            for name, entry in self._things.items()
            for key, tensor in _tensors(entry.thing.state_dict())
        }

    def scalars(self) -> dict[str, Any]:
        """All else, by name, as JSON."""
        return {
            name: typed.encode(_rest(entry.thing.state_dict()), name)
            for name, entry in self._things.items()
        }

    def load(self, scalars: Mapping[str, Any]) -> None:
        """Put back what ``scalars`` returned, tensors being in place. Raises ValueError when others
        are registered, LoadError.
        """
        if scalars.keys() != self._things.keys():
            raise ValueError(
                f"the state holds {sorted(scalars) or 'nothing'} of job.register, and the script"
                f" registers {sorted(self._things) or 'nothing'}: register the same, or start anew"
                " in another checkpoint directory"
            )
        for name, entry in self._things.items():
            state = entry.thing.state_dict()
            rest = typed.decode(scalars[name], _rest(state), name)
            _load(name, entry, rest, _only_tensors(state))

    def held(self) -> Held:
        """What they hold now; tensors are the objects' own, not copies."""
        states = {name: entry.thing.state_dict() for name, entry in self._things.items()}
        return Held(
            states={name: _only_tensors(state) for name, state in states.items()},
            rest={name: typed.encode(_rest(state), name) for name, state in states.items()},
        )

    def put_back(self, held: Held) -> None:
        """Have objects hold that again, the values of its tensors being in place. Those that do are
        left alone. Raises LoadError.
        """
        for name, entry in self._things.items():
            state, then = entry.thing.state_dict(), held.states[name]
            same = [*map(id, _own(state))] == [*map(id, _own(then))]
            if same and typed.encode(_rest(state), name) == held.rest[name]:
                continue
            _load(name, entry, typed.decode(held.rest[name], _rest(state), name), then)


def _text(encoded: Any) -> str:
    return json.dumps(encoded, sort_keys=True)  # as older checkpoints have them


def _entry_of(name: str, thing: Any, update: Callable[..., object] | None) -> _Entry:
    """Raises TypeError for what has no state."""
    if isinstance(thing, Generator):
        return _Entry(thing=_Generator(thing), make=None, update=update)
    has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    if has_state and not isinstance(thing, type):  # a class makes one
        return _Entry(thing=thing, make=None, update=update)
    if not callable(thing):
        raise TypeError(
            f"{name} is a {type(thing).__name__} without state_dict and load_state_dict: give an"
            " object that has both, a function that makes one, or a random generator"
        )
    return _Entry(thing=thing(), make=thing, update=update)


def _load(name: str, entry: _Entry, rest: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    """Raises LoadError."""
    if entry.make is not None:
        entry.thing = entry.make()
    values = {key: value.clone() for key, value in _tensors(tensors)}
    # decoded once more for the object, which may change what it is given
    entry.thing.load_state_dict(_merged(tensors, typed.round_trip(rest, name)))
    found = entry.thing.state_dict()
    why = typed.difference(rest, _rest(found), name)
    now = dict(_tensors(found))
    if why is None and values.keys() != now.keys():
        why = f"{name} has the tensors {sorted(now)} in place of {sorted(values)}"
    for key, value in values.items() if why is None else ():
        if not same_bits(value, now[key]):
            why = f"{name}.{key} has other values"
    if why is not None:
        raise LoadError(
            f"{type(entry.thing).__name__}.load_state_dict did not put back what it was given:"
            f" {why}. If it adds to what is there, register a function that makes the object anew:"
            f" job.register({name!r}, lambda: {type(entry.thing).__name__}(...))"
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same by type, shape and every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [part.detach().contiguous().view(-1).view(torch.uint8) for part in (one, other)]
    return torch.equal(*raw)


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value.detach()
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.")


def _own(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors themselves."""
    for value in state.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _own(value)


def _has_tensors(state: Mapping[str, Any]) -> bool:
    return next(_own(state), None) is not None


def _only_tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    found = {
        key: _only_tensors(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if isinstance(value, Mapping | Tensor)
    }
    return {key: value for key, value in found.items() if isinstance(value, Tensor) or value}


def _rest(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """All but the tensors; of what holds some, as a plain dictionary."""
    return {
        key: _rest(value) if isinstance(value, Mapping) and _has_tensors(value) else value
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }


def _merged(tensors: Mapping[Any, Any], rest: Mapping[Any, Any]) -> dict[Any, Any]:
    """Both together again."""
    nested = {
        key: _merged(tensors[key], value) if isinstance(tensors.get(key), Mapping) else value
        for key, value in rest.items()
    }
    return {**{key: value for key, value in tensors.items() if key not in rest}, **nested}


@runtime_checkable
class Steps(Protocol):
    """A scheduler of another library."""

    def step(self) -> Any:
        """After each step of the optimizer."""

    def state_dict(self) -> Mapping[str, Any]:
        """Numbers, text, lists and dictionaries."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Put back what ``state_dict`` returned, in place of what is there."""


Scheduler = LRScheduler | Steps
MakeScheduler = Callable[[Optimizer], Scheduler | None]


def is_scheduler(given: object) -> TypeGuard[Scheduler]:
    """Whether it is one, and no function or class that makes one."""
    return isinstance(given, Steps) and not isinstance(given, type)


class Schedule:
    """``given``: a scheduler, a function that makes it anew for each load, or None. Raises
    TypeError for what is none, or has state that cannot be saved.
    """

    def __init__(self, given: Scheduler | MakeScheduler | None, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._make: MakeScheduler | None = None
        self.scheduler: Any = given
        if given is not None and not is_scheduler(given):
            if not callable(given):
                raise TypeError(
                    f"{type(given).__name__} is no scheduler: it needs step(), state_dict() and"
                    " load_state_dict(), or to be a function of the optimizer that makes one"
                )
            self._make = given
            self.scheduler = given(optimizer)
        if self.scheduler is not None:
            for key, value in self.scheduler.state_dict().items():
                typed.round_trip(value, f"scheduler.{key}")

    def steps(self) -> int | None:
        """Steps that it has counted itself; None if it does not count, as a ChainedScheduler."""
        last = getattr(self.scheduler, "last_epoch", None)
        return None if last is None else int(last)

    def step(self, loss: float) -> None:
        """After a step of the optimizer. ``loss``: of the step, for one that goes by it."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def scalars(self) -> dict[str, Any]:
        """Its state, as JSON."""
        if self.scheduler is None:
            return {}
        return {
            k: typed.encode(v, f"scheduler.{k}") for k, v in self.scheduler.state_dict().items()
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what ``scalars`` returned. Raises LoadError."""
        if self.scheduler is None:
            return
        if self._make is not None:
            self.scheduler = self._make(self._optimizer)
        live = self.scheduler.state_dict()
        self.scheduler.load_state_dict(typed.decode(dict(saved), live))
        found = self.scalars()
        wrong = [key for key in saved if _text(found.get(key)) != _text(saved[key])]
        if wrong:
            name = type(self.scheduler).__name__
            raise LoadError(
                f"{name}.load_state_dict did not put back what it was given: {wrong[0]} is"
                f" {found.get(wrong[0])} in place of {saved[wrong[0]]}. If it adds to what is"
                f" there, give job.attach a function that makes the scheduler anew:"
                f" lambda optimizer: {name}(optimizer, ...)"
            )
