"""Where the software of compared stacks is: for each that needs one a virtual environment of its
own, pinned.

Below ``$TRAINCHAOS_STACKS`` (else ``$XDG_CACHE_HOME/trainchaos/stacks``, else
``~/.cache/trainchaos/stacks``) there is a directory an environment. It counts as ready once its
mark is written, which an install does last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from chaos import plugins
from chaos.errors import ScenarioError
from chaos.files import read_model
from chaos.scenario.sla import nearest
from harness.compare.environments.stack import ROOT, Requirements, Settings, Stack
from harness.compare.environments.tuned import stack_of

VARIABLE = "TRAINCHAOS_STACKS"
MARK = "trainchaos-ready.json"
OWNED = ".trainchaos-stack"
"""In every directory that an install made: no other is ever removed."""
CONSTRAINTS = ROOT / "constraints.txt"
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
"""What those need in turn."""
_BOUND = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+)\.(\d+)")


class Ready(BaseModel):
    """The mark. ``wanted``: what was asked of pip; ``python``: version; ``versions``: of
    everything, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    wanted: list[str]
    python: str
    versions: dict[str, str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The software of a stack, as it is now. ``why``: it is not ready, and what to do; ``python``:
    its interpreter; ``versions``: of the packages that make the stack; ``directory``: None where
    chaos's own environment serves.
    """

    name: str
    directory: Path | None
    ready: bool
    why: str
    python: Path
    versions: Mapping[str, str]


def stacks() -> dict[str, type[Stack]]:
    """Every stack: name -> class."""
    return plugins.load("harness.compare.stacks", Stack)


def find(name: str) -> type[Stack]:
    """The stack of that name. Raises ScenarioError with the nearest name."""
    known = stacks()
    if name in known:
        return known[name]
    near = nearest(name, sorted(known))
    raise ScenarioError(
        f"there is no stack {name!r}",
        hint=(f"did you mean {near}? " if near else "")
        + f"stacks are {', '.join(sorted(known))}: chaos stacks list",
    )


def made(name: str, settings: Settings = "default") -> Stack:
    """A stack with one of its settings. Raises ScenarioError as ``find`` does."""
    return stack_of(name, find(name), settings)


def root() -> Path:
    """Where environments lie."""
    said = os.environ.get(VARIABLE)
    if said:
        return Path(said).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "trainchaos" / "stacks"


def directory_of(name: str, requirements: Requirements) -> Path:
    """The environment's directory; stacks may share one."""
    return root() / (requirements.shared or name)


def interpreter(directory: Path) -> Path:
    """Of a virtual environment."""
    return directory / "bin" / "python"


def look(name: str) -> Environment:
    """The environment of a stack, from its mark; starts nothing. Raises ScenarioError for an
    unknown stack.
    """
    return _of(name, find(name))


def _of(name: str, stack: type[Stack]) -> Environment:
    requirements = stack.requirements
    if requirements is None:
        return _here(name)
    directory = directory_of(name, requirements)
    why, versions = _why_not(name, directory, requirements), {}
    mark = read_mark(directory)
    if mark is not None:
        names = {"python", *map(package_of, mark.wanted)}
        versions = {
            package: version
            for package, version in mark.versions.items()
            if canonical(package) in names
        }
        versions["python"] = mark.python
    return Environment(
        name=name,
        directory=directory,
        ready=not why,
        why=why,
        python=interpreter(directory),
        versions=versions,
    )


def need(name: str) -> Environment:
    """As ``look``. Raises ScenarioError, with the command that makes it, when it is not ready."""
    found = look(name)
    if not found.ready:
        raise ScenarioError(
            f"stack {name} is not ready: {found.why}", hint=f"chaos stacks install {name}"
        )
    return found


def python_of(name: str, stack: type[Stack] | None = None) -> Path | None:
    """Interpreter of a stack's environment; None when it is not ready. ``stack``: the class, where
    it is no plugin.
    """
    found = _of(name, stack or find(name))
    return found.python if found.ready else None


def versions_of(name: str, stack: type[Stack] | None = None) -> dict[str, str]:
    """Versions of the packages that make a stack, as they are installed."""
    return dict(_of(name, stack or find(name)).versions)


def wanted(requirements: Requirements) -> list[str]:
    """What an environment is made of, as pip takes it: the stack's pins, and what the training
    scripts need.
    """
    pins = {package_of(pin): pin for pin in pinned(COMMON)}
    pins |= {
        package_of(pin): pin for pin in (*requirements.pins, *requirements.without_dependencies)
    }
    return list(pins.values())


def pinned(names: Sequence[str]) -> list[str]:
    """These packages as ``constraints.txt`` has them; those that it has not are left out. Raises
    ScenarioError when there is no such file.
    """
    try:
        lines = CONSTRAINTS.read_text().splitlines()
    except OSError as error:
        raise ScenarioError(
            f"{CONSTRAINTS} cannot be read: {error.strerror}",
            hint="run chaos from a checkout of its repository",
        ) from error
    found = {package_of(line): line.strip() for line in lines if "==" in line}
    return [found[canonical(name)] for name in names if canonical(name) in found]


def package_of(pin: str) -> str:
    """Canonical name of the package that a pin is about."""
    return canonical(re.split(r"[\[<>=!~; @]", pin.strip(), maxsplit=1)[0])


def canonical(name: str) -> str:
    """As package names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unfit(
    requirements: Requirements, version: tuple[int, int] = sys.version_info[:2]
) -> str | None:
    """Why this Python cannot make the environment; None when it can."""
    tests = {
        ">=": version.__ge__,
        "<=": version.__le__,
        "==": version.__eq__,
        "!=": version.__ne__,
        ">": version.__gt__,
        "<": version.__lt__,
    }
    bounds = _BOUND.findall(requirements.python)
    if all(tests[operator]((int(major), int(minor))) for operator, major, minor in bounds):
        return None
    return f"it works with Python {requirements.python}, this is {version[0]}.{version[1]}"


def read_mark(directory: Path) -> Ready | None:
    """None when there is none that can be read."""
    try:
        return read_model(directory / MARK, Ready)
    except (OSError, ValueError):
        return None


def _why_not(name: str, directory: Path, requirements: Requirements) -> str:
    mark = read_mark(directory)
    if mark is None:
        unable = unfit(requirements)
        if unable:
            return unable
        if not directory.exists():
            return "it is not installed"
        ours = (directory / OWNED).exists()
        return (
            "an install of it was broken off"
            if ours
            else f"chaos stacks install did not make {directory}"
        )
    if mark.wanted != wanted(requirements):
        return "it was made for other versions"
    if not interpreter(directory).exists():
        return f"its Python {mark.python} is gone"
    return ""


def _here(name: str) -> Environment:
    try:
        versions = {package: metadata.version(package) for package in ("torch", "numpy")}
    except metadata.PackageNotFoundError as error:
        why = f"{error.name} is missing beside chaos: install chaos with its dependencies"
        return Environment(
            name=name,
            directory=None,
            ready=False,
            why=why,
            python=Path(sys.executable),
            versions={},
        )
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    return Environment(
        name=name,
        directory=None,
        ready=True,
        why="",
        python=Path(sys.executable),
        versions=versions,
    )
