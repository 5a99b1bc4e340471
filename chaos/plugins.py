"""Finds plugins: each module of a package is one plugin, and its name with dashes is the plugin's
name in YAML.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from types import ModuleType
from typing import TypeVar

FAULTS = "trainchaos.chaos.faults"
STRATEGIES = "trainchaos.recovery.policy.strategies"
LAUNCHERS = "trainchaos.harness.launchers"
WORKLOADS = "trainchaos.harness.workloads"
STACKS = "trainchaos.harness.compare.stacks"
"""The packages of plugins."""

T = TypeVar("T")


@cache
def load(package_name: str, base: type[T]) -> dict[str, type[T]]:
    """Every plugin of a package: YAML name -> the one public subclass of ``base`` its module
    defines.

    Raises TypeError when a module defines none or several.
    """
    package = importlib.import_module(package_name)
    found: dict[str, type[T]] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"{package_name}.{info.name}")
            found[info.name.replace("_", "-")] = _only_class(module, base)
    return found


@cache
def one(package_name: str, base: type[T], name: str) -> type[T]:
    """The plugin of a package by its YAML name. Unlike ``load`` it imports nothing else of the
    package.

    Raises ModuleNotFoundError, TypeError as ``load``.
    """
    return _only_class(importlib.import_module(module_of(package_name, name)), base)


def module_of(package_name: str, name: str) -> str:
    """The module of the plugin of that YAML name."""
    return f"{package_name}.{name.replace('-', '_')}"


def _only_class(module: ModuleType, base: type[T]) -> type[T]:
    classes = [
        member
        for name, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, base)
        and member.__module__ == module.__name__
        and not name.startswith("_")
    ]
    if len(classes) != 1:
        raise TypeError(
            f"{module.__name__} must define exactly one public {base.__name__}, it defines"
            f" {len(classes)}"
        )
    return classes[0]
