"""Recovery policies, one file each: pure functions from a cluster view to a decision."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from trainchaos.recovery.policy.strategy import Strategy


def names() -> list[str]:
    """Every strategy's name: its module's, with dashes."""
    return sorted(
        info.name.replace("_", "-")
        for info in pkgutil.iter_modules(__path__)
        if info.name[0] != "_"
    )


def find(name: str) -> type[Strategy]:
    """The strategy of that name. Raises KeyError when there is none."""
    if name not in names():
        raise KeyError(name)
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    classes = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Strategy) and member.__module__ == module.__name__
    ]
    return classes[0]


def name_of(strategy: Strategy) -> str:
    """The name of a strategy's class."""
    return type(strategy).__module__.rpartition(".")[2].replace("_", "-")
