"""Files and modules that documents, docstrings and comments name: each is there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.test_contributing import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("chaos", "recovery", "harness", "reports")
FOLDERS = (*ROOMS, "tests", "benchmarks", "scenarios", "docs", "examples", "templates")
PATH = re.compile(rf"(?<![\w/.$}}-])(?:{'|'.join(FOLDERS)})(?:/[\w.-]+)+/?")
MODULE = re.compile(rf"``?(?:trainchaos\.)?((?:{'|'.join(ROOMS)})(?:\.\w+)+)``?")
RECORDS = {"docs/comparison.md", "docs/search.md"}
"""Tables of what was played, with the names of that commit."""
SETTINGS = "chaos.yaml"
"""The file of a user's project, no module."""
EXAMPLE = {name for name, _ in BLOCKS.findall((ROOT / "CONTRIBUTING.md").read_text())}
"""Files that a reader is shown how to add."""
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
CODE = [
    path for room in (*ROOMS, "benchmarks", "tests") for path in sorted((ROOT / room).rglob("*.py"))
]


def named(path: Path) -> Iterator[str]:
    """Names in a text that do not exist."""
    text = path.read_text()
    for found in PATH.findall(text) if path.suffix == ".md" else ():
        place = ROOT / found.rstrip("./")
        if found not in EXAMPLE and not (
            place.exists() or place.with_name(place.name + ".py").exists()
        ):
            yield found
    for found in MODULE.findall(text):
        if found != SETTINGS and not resolves(found):
            yield found


def resolves(name: str) -> bool:
    """Whether it is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:end])
        if place.is_dir() or place.with_suffix(".py").is_file():
            break
    rest = parts[end:]
    if not rest:
        return True
    if place.is_dir() and not (place / "__init__.py").is_file():
        return False
    thing = importlib.import_module(".".join(["trainchaos", *parts[:end]]))
    for part in rest:
        if not hasattr(thing, part) and part not in getattr(thing, "__annotations__", {}):
            return False
        thing = getattr(thing, part, None)
    return True


@pytest.mark.slow
def test_what_a_text_names_is_there() -> None:
    found = {str(path.relative_to(ROOT)): list(named(path)) for path in (*DOCUMENTS, *CODE)}
    found = {path: names for path, names in found.items() if names and path not in RECORDS}
    assert found == {}


def test_a_beacon_is_called_as_users_import_it() -> None:
    wrong = re.compile(r"(?<!\w\.)\bchaos\.beacon\.\w+")
    product = [path for path in (*DOCUMENTS, *CODE) if not path.is_relative_to(ROOT / "tests")]
    found = {str(path.relative_to(ROOT)): wrong.findall(path.read_text()) for path in product}
    found = {path: names for path, names in found.items() if names}
    assert found == {}, "from trainchaos import beacon: beacon.step(...), beacon.point(...)"
