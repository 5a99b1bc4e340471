"""Makes a fault from its kind and parameters; the only place where faults are made.

A scenario, a plan and a command to a rank name a fault by its kind and parameters. Each process
that acts on or judges a fault makes it here, once, and passes the object on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from trainchaos.chaos import plugins
from trainchaos.chaos.fault.base import Fault


class FaultEntry(Protocol):
    """A fault by name: an entry of a scenario or plan."""

    @property
    def id(self) -> str:
        """Unique in its scenario."""

    @property
    def kind(self) -> str:
        """Name of the plugin."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Its parameters as written; missing ones have their defaults."""


def build(
    kind: str, params: Mapping[str, Any], kinds: Mapping[str, type[Fault]] | None = None
) -> Fault:
    """Make the fault of a kind with these parameters. ``kinds``: name -> class; None: import only
    the plugin of that name.

    Raises KeyError (ModuleNotFoundError without ``kinds``) for an unknown kind, and
    pydantic.ValidationError for parameters that the kind does not accept.
    """
    model = plugins.one(plugins.FAULTS, Fault, kind) if kinds is None else kinds[kind]
    return model(**params)


def build_all(
    named: Iterable[FaultEntry], kinds: Mapping[str, type[Fault]] | None = None
) -> dict[str, Fault]:
    """Make all faults, by id and in order. Raises as ``build``."""
    return {each.id: build(each.kind, each.params, kinds) for each in named}
