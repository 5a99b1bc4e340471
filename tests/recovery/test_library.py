"""The library's public names: all in one place, and as the page says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from trainchaos import recovery
from trainchaos.recovery.rank.job import Job

PAGE = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
TABLE = PAGE.split("All public names", 1)[1].split("\n\n", 2)[1]
ROWS = [row.split("|")[1] for row in TABLE.splitlines()[2:]]
WORDS = [word for row in ROWS for word in re.findall(r"`([^`]+)`", row)]
CALLS = [word for word in WORDS if "(" in word]


def resolved(name: str) -> object:
    """What a name of the page stands for; attributes that are set in ``__init__`` count too."""
    owner, _, attribute = name.partition(".")
    found = getattr(recovery, owner)
    if not attribute:
        return found
    if hasattr(found, attribute):
        return getattr(found, attribute)
    assert f"self.{attribute}" in inspect.getsource(found.__init__), f"{name} does not exist"
    return None


def names() -> list[str]:
    """Of the table; ``.world`` after ``Job.rank`` is ``Job.world``."""
    found: list[str] = []
    for row in ROWS:
        owner = ""
        for word in re.findall(r"`([^`]+)`", row.split("->")[0]):
            name = re.split(r"\(", word)[0]
            owner = owner or name.partition(".")[0]
            found.append(owner + name if name.startswith(".") else name)
    return found


def test_every_public_name_is_on_the_page_and_documented() -> None:
    assert set(recovery.__all__) <= set(names())
    for name in recovery.__all__:
        assert inspect.getdoc(getattr(recovery, name)), name


@pytest.mark.parametrize("name", names())
def test_what_is_on_the_page_exists_and_says_what_it_does(name: str) -> None:
    assert name.partition(".")[0] in recovery.__all__
    found = resolved(name)
    if callable(found) or isinstance(found, property):
        assert inspect.getdoc(found)


@pytest.mark.parametrize("call", CALLS)
def test_parameters_are_as_the_page_says(call: str) -> None:
    name, _, rest = call.partition("(")
    given = [part.split("=")[0].strip() for part in rest.rstrip(")").split(",") if part.strip()]
    wanted = [p for p in inspect.signature(resolved(name)).parameters if p != "self"]  # type: ignore[arg-type]
    assert [part for part in given if part != "*"] == wanted


def test_the_command_on_the_page_is_the_one_there_is() -> None:
    assert "python -m trainchaos.recovery.run --ranks 4 --spares 1 train.py" in PAGE
    from trainchaos.recovery.cli.options import parser

    options = {option for action in parser(None)._actions for option in action.option_strings}
    said = set(re.findall(r"`(--[a-z-]+)", PAGE.split("## Supervising it", 1)[1]))
    assert {option for option in options if option.startswith("--") and option != "--help"} >= said
    assert Job.__module__ == "trainchaos.recovery.rank.job"
