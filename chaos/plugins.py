"""Finds plugins: each module of a package is one plugin, and its name with dashes is the plugin's
name in YAML.

Plugins from outside are found in two ways. Both run code of those who wrote them.

- Directories in ``$CHAOS_PLUGINS`` (``chaos --plugins DIR``, ``chaos.yaml``) with folders
  ``faults``, ``strategies``, ``launchers``, ``workloads``, ``stacks`` and ``reports``: a file there
  is a module of the package of that sort, as if it lay in this project.
- Entry points of installed distributions, in groups of these names: ``trainchaos.faults`` and so
  on. The name is the plugin's; the value is a module, or ``module:Class``.

A plugin from outside that is broken, or has the name of another, is left out: ``left_out`` says
which and why. A broken one of this project is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TypeVar

FAULTS = "trainchaos.chaos.faults"
STRATEGIES = "trainchaos.recovery.policy.strategies"
LAUNCHERS = "trainchaos.harness.launchers"
WORKLOADS = "trainchaos.harness.workloads"
STACKS = "trainchaos.harness.compare.stacks"
REPORTS = "trainchaos.reports"
"""The packages of plugins."""
SORTS = {
    FAULTS: "faults",
    STRATEGIES: "strategies",
    LAUNCHERS: "launchers",
    WORKLOADS: "workloads",
    STACKS: "stacks",
    REPORTS: "reports",
}
"""Package -> folder of a directory of plugins; after ``trainchaos.``, group of entry points."""
DIRECTORIES = "CHAOS_PLUGINS"
"""Environment variable with directories of plugins, as in ``PATH``; processes of a run inherit it.
"""
OPTION = "--plugins"
"""Option of every command that names one."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a plugin is. ``module``: dotted; ``attribute``: its class, empty for the only one;
    ``place``: file or distribution, for people; empty for a plugin of this project.
    """

    name: str
    module: str
    attribute: str = ""
    place: str = ""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A plugin from outside that cannot be used. ``sort``: a value of ``SORTS``, empty for a whole
    directory.
    """

    sort: str
    name: str
    place: str
    why: str

    def __str__(self) -> str:
        if not self.sort:
            return f"plugins of {self.place} are left out: {self.why}"
        return f"plugin {self.sort}/{self.name} ({self.place}) is left out: {self.why}"


DIRECTORY = "directory"
"""In place of a package: whole directories."""
_LEFT_OUT: dict[str, list[LeftOut]] = {}


def directories() -> list[Path]:
    """The directories of ``$CHAOS_PLUGINS`` that are there, absolute, in their order."""
    told = filter(None, os.environ.get(DIRECTORIES, "").split(os.pathsep))
    return [
        place for place in dict.fromkeys(Path(one).absolute() for one in told) if place.is_dir()
    ]


def named_in(command_line: str) -> list[str]:
    """The directories that a stored command line names with ``--plugins``, as they were written."""
    try:
        words = shlex.split(command_line)
    except ValueError:  # written by another version, or by hand
        return []
    given = [after for word, after in pairwise(words) if word == OPTION]
    return given + [word.partition("=")[2] for word in words if word.startswith(f"{OPTION}=")]


def with_outside(path: Sequence[str], sort: str) -> list[str]:
    """The ``__path__`` of a package of plugins, and after it that sort's folders outside."""
    return list(dict.fromkeys([*path, *(str(place / sort) for place in directories())]))


@cache
def load(package_name: str, base: type[T]) -> dict[str, type[T]]:
    """Every plugin of a package: YAML name -> the one public subclass of ``base`` its module
    defines.

    Raises TypeError when a module of this project defines none or several.
    """
    found: dict[str, type[T]] = {}
    for source in sources(package_name):
        try:
            found[source.name] = _class_of(source, base)
        # a module of others may do anything when it is imported, even exit
        except (Exception, SystemExit) as error:
            if not source.place:
                raise
            _leave_out(package_name, source, f"{type(error).__name__}: {error}")
    return found


@cache
def one(package_name: str, base: type[T], name: str) -> type[T]:
    """The plugin of a package by its YAML name. Unlike ``load`` it imports nothing else of the
    package.

    Raises ModuleNotFoundError, TypeError as ``load``.
    """
    return _class_of(_source(package_name, name), base)


def module_of(package_name: str, name: str) -> str:
    """The module of the plugin of that YAML name."""
    return _source(package_name, name).module


def name_of(package_name: str, kind: type) -> str:
    """The YAML name of a plugin's class."""
    return next(
        (
            source.name
            for source in sources(package_name)
            if source.module == kind.__module__ and source.attribute in ("", kind.__name__)
        ),
        _dashed(kind.__module__.rpartition(".")[2]),
    )


@cache
def sources(package_name: str) -> tuple[Source, ...]:
    """Every plugin of a package and from outside, without importing any, in order of names."""
    _LEFT_OUT[package_name] = []
    found: dict[str, Source] = {}
    for source in (*_modules(package_name), *_entry_points(package_name)):
        if (other := found.get(source.name)) is None:
            found[source.name] = source
        else:
            of = other.place or "this project"
            _leave_out(package_name, source, f"{of} has one of that name")
    return tuple(found[name] for name in sorted(found))


def left_out(package_name: str = "", name: str = "") -> list[LeftOut]:
    """Plugins from outside that ``sources`` and ``load`` left out so far: of one package, of one
    name, or all.
    """
    rows = (
        _LEFT_OUT.get(package_name, [])
        if package_name
        else [r for v in _LEFT_OUT.values() for r in v]
    )
    return [row for row in rows if name in ("", row.name)]


def leave_out_directory(place: Path, why: str) -> None:
    """Note that a directory of plugins cannot be used."""
    _LEFT_OUT.setdefault(DIRECTORY, []).append(LeftOut(sort="", name="", place=str(place), why=why))


def forget() -> None:
    """Look anew for plugins from now on."""
    for cached in (load, one, sources):
        cached.cache_clear()
    _LEFT_OUT.clear()


def _modules(package_name: str) -> Iterator[Source]:
    """Modules of the package, this project's first; folders outside that were named since it was
    imported are added to its path.
    """
    package = importlib.import_module(package_name)
    sort = SORTS.get(package_name, "")
    package.__path__ = with_outside(package.__path__, sort) if sort else package.__path__
    outside = {str(place / sort) for place in directories()}
    own = [place for place in package.__path__ if place not in outside]
    for place in (*own, *(one for one in package.__path__ if one in outside)):
        for info in sorted(pkgutil.iter_modules([place]), key=lambda info: info.name):
            if not info.name.startswith("_") and not (info.ispkg and package_name == REPORTS):
                yield Source(
                    name=_dashed(info.name),
                    module=f"{package_name}.{info.name}",
                    place=f"{place}/{info.name}.py" if place in outside else "",
                )


def _entry_points(package_name: str) -> Iterator[Source]:
    sort = SORTS.get(package_name)
    if sort is None:
        return
    from importlib.metadata import entry_points  # slow, and a rank does without it

    for point in entry_points(group=f"trainchaos.{sort}"):
        of = point.dist.name if point.dist is not None else "?"
        yield Source(
            name=point.name, module=point.module, attribute=point.attr or "", place=f"package {of}"
        )


def _source(package_name: str, name: str) -> Source:
    """The plugin's source; of a name that nobody has, the module that it would have here. Entry
    points are read only for a name that no module has: that takes longer than a rank's start.
    """
    here = Source(name=name, module=f"{package_name}.{name.replace('-', '_')}")
    if importlib.util.find_spec(here.module) is not None:
        return here
    return next((source for source in sources(package_name) if source.name == name), here)


def _class_of(source: Source, base: type[T]) -> type[T]:
    module = importlib.import_module(source.module)
    if not source.attribute:
        return _only_class(module, base)
    made = getattr(module, source.attribute)
    if not (inspect.isclass(made) and issubclass(made, base)):
        raise TypeError(f"{source.module}:{source.attribute} is no {base.__name__}")
    return made


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


def _leave_out(package_name: str, source: Source, why: str) -> None:
    row = LeftOut(sort=SORTS[package_name], name=source.name, place=source.place, why=why)
    _LEFT_OUT.setdefault(package_name, []).append(row)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
