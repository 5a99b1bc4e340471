"""Size limits for scenarios, checked before anything whose cost grows with size, so that any file
is judged within two seconds and half a gigabyte.

The limits are far above what people write; they stop files that are not scenarios, or are
malicious.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainchaos.chaos.source.diagnostics import Loc, Problem

MAX_PARTS = 20_000  # values and lines of a file, counted by what separates them
MAX_NESTED = 60  # more than any depth that is read
MAX_GROWN = 1_000_000  # characters that references may add to one cell
MAX_VALUES = 25_000  # of a cell, after references
MAX_FAULTS = 500
MAX_RANKS = 65_536
MAX_WORK = 25_000  # values of all cells together

_SEPARATORS = (",", "\n", "- ", ": ", "? ", "[", "{")
_BRACKET = re.compile(r"[\[\]{}]")
_STACKED = re.compile(rf"(?:[-?:][ \t]+){{{MAX_NESTED}}}")


def text_problem(text: str) -> str:
    """Why YAML text should not be parsed; empty: it may be. Counts an upper bound of its values in
    linear time.
    """
    parts = sum(text.count(separator) for separator in _SEPARATORS)
    if parts > MAX_PARTS:
        return f"more than {MAX_PARTS} lines and values; is it a scenario?"
    depth = deepest = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return "nested too deeply" if deepest > MAX_NESTED or _STACKED.search(text) else ""


def tree_problems(tree: Any) -> list[Problem]:
    """Parts of a resolved scenario that are too large to check."""
    if not isinstance(tree, dict):
        return []
    if count(tree, MAX_VALUES) > MAX_VALUES:
        return [Problem((), f"more than {MAX_VALUES} values, with all references resolved")]
    return [*_too_many(tree, "faults", MAX_FAULTS), *_ranks(tree)]


def work_problems(cells: int, tree: Any) -> list[Problem]:
    """A problem if this many cells are too much to check."""
    values = cells * count(tree, MAX_WORK)
    if cells < 2 or values <= MAX_WORK:
        return []
    message = (
        f"{cells} cells of {values // cells} values each are more than can be checked: split the"
        " scenario"
    )
    return [Problem(("matrix",), message, on_key=True)]


def count(tree: Any, limit: int) -> int:
    """Plain values in a tree; no further than a little over ``limit``."""
    found = 0
    waiting: list[Iterator[Any]] = [iter([tree])]
    while waiting and found <= limit:
        try:
            value = next(waiting[-1])
        except StopIteration:
            waiting.pop()
            continue
        found += 1
        if isinstance(value, dict):
            waiting.append(iter(value.values()))
        elif isinstance(value, list):
            waiting.append(iter(value))
    return found


def _too_many(tree: dict[str, Any], key: str, limit: int) -> Iterator[Problem]:
    value = tree.get(key)
    if isinstance(value, list) and len(value) > limit:
        yield Problem((key,), f"{len(value)} {key}, more than {limit}", on_key=True)


def _ranks(tree: dict[str, Any]) -> Iterator[Problem]:
    workload = tree.get("workload")
    ranks = workload.get("ranks") if isinstance(workload, dict) else None
    loc: Loc = ("workload", "ranks")
    if isinstance(ranks, int | float) and ranks > MAX_RANKS:
        yield Problem(loc, f"ranks must be at most {MAX_RANKS}, not {ranks}")
