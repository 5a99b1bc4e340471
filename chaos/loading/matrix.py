"""The matrix: axes whose product, adjusted by ``include`` and ``exclude``, gives the cells of a
scenario.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.source.diagnostics import Loc, Problem, unknown

MAX_CELLS = 1000
DEFAULT_CELL = "default"
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")
_MAX_NAME = 60


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One cell to be: ``id``, and name -> (value, where it stands)."""

    id: str
    values: Mapping[str, tuple[Any, Loc]]


def expand(matrix: Any) -> tuple[list[Combination], list[Problem]]:
    """The cells of a ``matrix`` (None: one cell, ``default``) in the file's order, and what is
    wrong.
    """
    if matrix is None or matrix == {}:
        return [Combination(id=DEFAULT_CELL, values={})], []
    if not isinstance(matrix, dict):
        return [], [Problem(("matrix",), "matrix needs a mapping: axis name -> list of values")]
    axes = {name: values for name, values in matrix.items() if name not in ("include", "exclude")}
    problems = [
        problem for name, values in axes.items() for problem in _axis_problems(name, values)
    ]
    problems += _adjustment_problems(matrix, axes)
    size = math.prod(len(values) for values in axes.values() if isinstance(values, list))
    if size > MAX_CELLS:
        problems.append(
            Problem(("matrix",), f"{size} combinations, more than {MAX_CELLS}", on_key=True)
        )
    if problems:
        return [], problems
    picked = [
        dict(zip(axes, chosen, strict=True))
        for chosen in itertools.product(*map(_indexed, axes.items()))
    ]
    if not axes:
        picked = []
    excluded = matrix.get("exclude") or []
    kept = [
        values for values in picked if not any(_matches(values, pattern) for pattern in excluded)
    ]
    kept += [
        {name: (value, ("matrix", "include", index, name)) for name, value in entry.items()}
        for index, entry in enumerate(matrix.get("include") or [])
    ]
    if not kept:
        return [], [Problem(("matrix",), "the matrix has no combination left", on_key=True)]
    return _named(kept)


def value_name(value: Any) -> str:
    """A short stable name of a matrix value, safe in a path: ``hot-spare+spares=2`` for a
    mapping.
    """
    text = _plain_name(value)
    safe = _UNSAFE.sub("-", text).strip(".")
    if safe == text and safe:
        return _short(safe)
    return f"{safe[:_MAX_NAME]}-{_digest(text)}"


def _short(name: str) -> str:
    # cell ids are directory names: 255 bytes at most, with room for the arm's suffix
    return name if len(name) <= 2 * _MAX_NAME else f"{name[: 2 * _MAX_NAME]}-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _plain_name(value: Any) -> str:
    if isinstance(value, dict):
        lead = next((key for key in ("strategy", "kind") if key in value), None)
        rest = "+".join(
            f"{key}={_plain_name(child)}" for key, child in sorted(value.items()) if key != lead
        )
        return "+".join(part for part in (_plain_name(value[lead]) if lead else "", rest) if part)
    if isinstance(value, list):
        return "-".join(_plain_name(child) for child in value)
    return (
        str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
    )


def _axis_problems(name: str, values: Any) -> list[Problem]:
    if not isinstance(values, list) or not values:
        return [
            Problem(("matrix", name), f"matrix axis {name!r} needs a list with at least one value")
        ]
    seen: dict[str, int] = {}
    problems = []
    for index, value in enumerate(values):
        if seen.setdefault(value_name(value), index) != index:
            problems.append(
                Problem(("matrix", name, index), f"{value_name(value)} is on this axis twice")
            )
    return problems


def _adjustment_problems(matrix: Mapping[str, Any], axes: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for which in ("include", "exclude"):
        entries = matrix.get(which)
        if entries is None:
            continue
        if not isinstance(entries, list):
            problems.append(Problem(("matrix", which), f"{which} needs a list of mappings"))
            continue
        for index, entry in enumerate(entries):
            loc: Loc = ("matrix", which, index)
            if not isinstance(entry, dict) or not entry:
                problems.append(Problem(loc, f"{which} needs mappings: axis name -> value"))
            elif which == "exclude":
                problems += [
                    Problem((*loc, name), unknown("matrix axis", name, axes), on_key=True)
                    for name in entry.keys() - axes.keys()
                ]
            elif missing := axes.keys() - entry.keys():
                message = (
                    "an included combination names every axis; missing:"
                    f" {', '.join(sorted(missing))}"
                )
                problems.append(Problem(loc, message))
    return problems


def _indexed(axis: tuple[str, list[Any]]) -> list[tuple[Any, Loc]]:
    name, values = axis
    return [(value, ("matrix", name, index)) for index, value in enumerate(values)]


def _matches(values: Mapping[str, tuple[Any, Loc]], pattern: Mapping[str, Any]) -> bool:
    return all(values[name][0] == wanted for name, wanted in pattern.items())


def _named(kept: list[dict[str, tuple[Any, Loc]]]) -> tuple[list[Combination], list[Problem]]:
    cells: dict[str, Combination] = {}
    problems = []
    for values in kept:
        name = _short(
            ",".join(
                f"{value_name(axis)}={value_name(value)}" for axis, (value, _) in values.items()
            )
        )
        if name in cells:
            loc = next(iter(values.values()))[1]
            problems.append(Problem(loc, f"combination {name} is there twice"))
        cells[name] = Combination(id=name, values=values)
    return list(cells.values()), problems
