"""State of the user's own that belongs to a job's: an average of the weights, a curriculum,
counters.

It is saved, restored and copied with the model: tensors as tensors, and what else there is as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor


class Stateful(Protocol):
    """Tensors in ``state_dict`` are the object's own, not copies; all else can be written
    as JSON.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Nested mappings of tensors and JSON values."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Put back what ``state_dict`` returned."""


class Registered:
    """Objects by name."""

    def __init__(self) -> None:
        self._things: dict[str, tuple[Stateful, Callable[[], None] | None]] = {}

    def add(self, name: str, thing: Stateful, update: Callable[[], None] | None) -> None:
        """Raises ValueError for a name that is taken, TypeError for state that cannot be stored or
        copied.
        """
        if not name.isidentifier() or name in self._things:
            raise ValueError(
                f"{name!r} is {'registered already' if name in self._things else 'no identifier'}"
            )
        again = dict(_tensors(thing.state_dict()))
        for key, tensor in _tensors(thing.state_dict()):
            if again[key].data_ptr() != tensor.data_ptr():
                raise TypeError(f"{name}.{key} is copied by state_dict(): return the tensor itself")
        try:
            json.dumps(_rest(thing.state_dict()), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the state of {name} holds what is neither tensor nor JSON: {error}"
            ) from error
        self._things[name] = thing, update

    def update(self) -> None:
        """After an optimizer step."""
        for _, update in self._things.values():
            if update is not None:
                update()

    def tensors(self) -> dict[str, Tensor]:
        """By name (``user.<name>.<key>``), live."""
        return {
            f"user.{name}.{key}": tensor
            for name, (thing, _) in self._things.items()
            for key, tensor in _tensors(thing.state_dict())
        }

    def scalars(self) -> dict[str, Any]:
        """All else, by name."""
        return {name: _rest(thing.state_dict()) for name, (thing, _) in self._things.items()}

    def load(self, scalars: Mapping[str, Any]) -> None:
        """Put back what ``scalars`` returned, tensors being in place. Raises ValueError when others
        are registered.
        """
        if scalars.keys() != self._things.keys():
            raise ValueError(
                f"the state holds {sorted(scalars) or 'nothing'} of job.register, and the script"
                f" registers {sorted(self._things) or 'nothing'}: register the same, or start anew"
                " in another checkpoint directory"
            )
        for name, (thing, _) in self._things.items():
            thing.load_state_dict(_merged(thing.state_dict(), scalars[name]))


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value.detach()
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.")


def _rest(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _rest(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }


def _merged(state: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    nested = {
        key: _merged(state[key], value) if isinstance(state.get(key), Mapping) else value
        for key, value in rest.items()
    }
    return tensors | nested
