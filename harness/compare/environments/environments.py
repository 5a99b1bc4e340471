"""Finds the software of compared stacks: each stack that needs one has a separate virtual
environment with pinned packages.

Below ``$TRAINCHAOS_STACKS`` (else ``$XDG_CACHE_HOME/trainchaos/stacks``, else
``~/.cache/trainchaos/stacks``) there is one directory per environment. It counts as ready once its
mark is written, the last act of an install.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict

from trainchaos.chaos import plugins
from trainchaos.chaos.errors import NewerVersion, ScenarioError
from trainchaos.chaos.files import read_model
from trainchaos.chaos.home import HOME, cache
from trainchaos.chaos.source.diagnostics import unknown
from trainchaos.harness.compare.environments.stack import Requirements, Stack

VARIABLE = "TRAINCHAOS_STACKS"
MARK = "trainchaos-ready.json"
OWNED = ".trainchaos-stack"
"""Marker in every directory made by an install; no other directory is ever removed."""
CONSTRAINTS = HOME / "constraints.txt"
COMMON = ("torch", "numpy", "pydantic", "xxhash")
"""What the training scripts of all stacks need; in each environment, in the versions of
``constraints.txt``.
"""
BELOW_THEM = (
    "annotated-types",
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "pydantic-core",
    "sympy",
    "typing-extensions",
    "typing-inspection",
)
"""Their dependencies."""


class ReadyMark(BaseModel):
    """The mark of a ready environment. ``wanted``: requirements given to pip; ``python``: version;
    ``versions``: of all packages, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    wanted: list[str]
    python: str
    versions: dict[str, str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Current state of a stack's software. ``why``: why it is not ready, and what to do;
    ``python``: its interpreter; ``versions``: of the stack's own packages; ``directory``: None if
    chaos's own environment is used.
    """

    name: str
    directory: Path | None
    ready: bool
    why: str
    python: Path
    versions: Mapping[str, str]


def stacks() -> dict[str, type[Stack]]:
    """Every stack: name -> class."""
    return plugins.load(plugins.STACKS, Stack)


def find(name: str) -> type[Stack]:
    """The stack of that name. Raises ScenarioError with the nearest name."""
    known = stacks()
    if name in known:
        return known[name]
    raise ScenarioError(unknown("stack", name, known), hint="chaos stacks list shows them all")


def root() -> Path:
    """Directory of all environments."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser().absolute() if given else cache() / "stacks"


def interpreter(directory: Path) -> Path:
    """The Python interpreter of a virtual environment."""
    return directory / "bin" / "python"


def look(name: str) -> Environment:
    """The environment of a stack, from its mark; starts nothing. Raises ScenarioError for an
    unknown stack.
    """
    return of(name, find(name))


def of(name: str, stack: type[Stack]) -> Environment:
    """As ``look``, of a stack that need not be a plugin."""
    requirements = stack.requirements
    if requirements is None:
        return _here(name)
    directory = root() / (requirements.shared or name)
    why, mark = _why_not(directory, requirements), read_mark(directory)
    names = {package_of(pin) for pin in mark.wanted} if mark else set()
    known = (
        {p: v for p, v in mark.versions.items() if canonicalize_name(p) in names} if mark else {}
    )
    return Environment(
        name=name,
        directory=directory,
        ready=not why,
        why=why,
        python=interpreter(directory),
        versions={**known, "python": mark.python} if mark else {},
    )


def wanted(requirements: Requirements) -> list[str]:
    """Requirements of an environment for pip: the stack's pins, and packages the training scripts
    need.
    """
    pins = {package_of(pin): pin for pin in pinned(COMMON)}
    pins |= {
        package_of(pin): pin for pin in (*requirements.pins, *requirements.without_dependencies)
    }
    return list(pins.values())


def pinned(names: Sequence[str]) -> list[str]:
    """Pins of these packages from ``constraints.txt``; packages not listed there are omitted.
    Raises ScenarioError if the file cannot be read.
    """
    try:
        lines = CONSTRAINTS.read_text().splitlines()
    except OSError as error:
        raise ScenarioError(
            f"{CONSTRAINTS} cannot be read: {error.strerror}",
            hint="run chaos from a checkout of its repository",
        ) from error
    found = {package_of(line): line.strip() for line in lines if "==" in line}
    return [found[canonicalize_name(name)] for name in names if canonicalize_name(name) in found]


def package_of(pin: str) -> str:
    """Canonical name of a pin's package."""
    return canonicalize_name(Requirement(pin).name)


def unfit(
    requirements: Requirements, version: str = "{}.{}".format(*sys.version_info)
) -> str | None:
    """Why this Python cannot make the environment; None when it can."""
    if version in SpecifierSet(requirements.python):
        return None
    return f"it works with Python {requirements.python}, this is {version}"


def read_mark(directory: Path) -> ReadyMark | None:
    """The mark of a directory; None if it is missing or unreadable."""
    try:
        return read_model(directory / MARK, ReadyMark)
    except (OSError, ValueError, NewerVersion):
        return None


def _why_not(directory: Path, requirements: Requirements) -> str:
    mark = read_mark(directory)
    if mark is None:
        if unable := unfit(requirements):
            return unable
        if not directory.exists():
            return "it is not installed"
        if (directory / OWNED).exists():
            return "an install of it was interrupted"
        return f"chaos stacks install did not make {directory}"
    if mark.wanted != wanted(requirements):
        return "it was made for other versions"
    if not interpreter(directory).exists():
        return f"its Python {mark.python} is gone"
    return ""


def _here(name: str) -> Environment:
    why, versions = "", {"python": platform.python_version()}
    try:
        versions |= {package: metadata.version(package) for package in ("torch", "numpy")}
    except metadata.PackageNotFoundError as error:
        why = f"{error.name} is missing beside chaos: install chaos with its dependencies"
    return Environment(
        name=name,
        directory=None,
        ready=not why,
        why=why,
        python=Path(sys.executable),
        versions={} if why else versions,
    )
