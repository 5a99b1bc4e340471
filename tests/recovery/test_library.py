"""The library's public names are documented, and its pages and the generated reference name what
there is.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from trainchaos import recovery
from trainchaos.recovery.cli.options import parser

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, RULES = ((DOCS / name).read_text() for name in ("recovery.md", "recovery-rules.md"))


def _reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "recovery_reference", DOCS / "site" / "recovery_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = _reference()
METHODS = [
    f"{owner}.{name}" for owner, names in REFERENCE.MEMBERS.items() for name in names.split()
]


@pytest.mark.parametrize("name", [*recovery.__all__, *METHODS])
def test_a_public_name_is_documented_with_each_of_its_parameters(name: str) -> None:
    owner, _, member = name.partition(".")
    thing = getattr(recovery, owner)
    thing = getattr(thing, member) if member else thing
    text = inspect.getdoc(thing)
    assert text
    if callable(thing) and not inspect.isclass(thing):
        taken = [p for p in inspect.signature(thing).parameters if p != "self"]
        more = len(taken) > 2  # of one or two the summary line speaks
        assert [one for one in taken if more and one not in text] == []
    assert f"`{name}`" in REFERENCE.page() or f"`recovery.{name}`" in REFERENCE.page()


@pytest.mark.parametrize("call", sorted(set(re.findall(r"\bjob\.(\w+)\(", GUIDE + RULES))))
def test_what_a_page_calls_is_in_the_reference(call: str) -> None:
    assert f"Job.{call}" in METHODS


@pytest.mark.parametrize("call", sorted(set(re.findall(r"\bstep\.(\w+)\(", GUIDE + RULES))))
def test_what_a_page_calls_of_a_step_is_in_the_reference(call: str) -> None:
    assert f"Step.{call}" in METHODS


def test_the_options_that_pages_name_are_those_there_are() -> None:
    assert "python -m trainchaos.recovery.run --ranks 4 --spares 1 train.py" in GUIDE
    there = {option for action in parser(None)._actions for option in action.option_strings}
    named = set(re.findall(r"[` ](--[a-z][a-z-]+)", GUIDE + RULES)) - {"--help"}
    agent = {"--coordinator", "--node"}
    assert named - there <= agent and agent <= set(re.findall(r"--\w+", REFERENCE.page()))


def test_rules_are_numbered_without_a_gap() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", RULES, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
