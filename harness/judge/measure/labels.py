"""Labels of cells in tables, charts and comparisons: the strategy and the fewest facts that tell
cells apart.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_KEYS = 8
MOST_LETTERS = 40


@dataclass(frozen=True, kw_only=True)
class CellIdentity:
    """A cell: its id, its strategy (or program), and the matrix values chosen for it."""

    id: str
    strategy: str
    params: Mapping[str, Any]


def labels(cells: Iterable[CellIdentity]) -> dict[str, str]:
    """Cell id -> unique label.

    An axis that is not the strategy (``ranks: [2, 4]``) is in every label if its value differs
    between any two cells, because it is a condition of the comparison. The strategy's parameters
    appear only where cells share a strategy: the fewest that tell all of its cells apart. A cell
    for which that is not enough keeps its id.
    """
    known = list(cells)
    conditions = {one.id: dict(_conditions(one)) for one in known}
    shared = _varying(list(conditions.values()))
    groups: dict[str, list[CellIdentity]] = defaultdict(list)
    for one in known:
        groups[one.strategy].append(one)
    found: dict[str, str] = {}
    for strategy, members in groups.items():
        outer = [{key: conditions[one.id].get(key) for key in shared} for one in members]
        own = [dict(_own(one)) for one in members]
        keys = _fewest(outer, own)
        for one, around, mine in zip(members, outer, own, strict=True):
            facts = [*around.items(), *((key, mine.get(key)) for key in keys)]
            shown = [f"{key}={value}" for key, value in facts if value is not None]
            found[one.id] = " ".join([strategy, *shown])
    return {name: label if _unique(found, label) else name for name, label in found.items()}


def _unique(found: Mapping[str, str], label: str) -> bool:
    return sum(other == label for other in found.values()) == 1


def _of_strategy(one: CellIdentity, value: Any) -> bool:
    """Whether a matrix value is the strategy, with or without parameters."""
    return value == one.strategy or (
        isinstance(value, Mapping) and value.get("strategy") == one.strategy
    )


def _conditions(one: CellIdentity) -> Iterator[tuple[str, str]]:
    for axis, value in one.params.items():
        if not _of_strategy(one, value):
            yield from _flat(axis, value)


def _own(one: CellIdentity) -> Iterator[tuple[str, str]]:
    for value in one.params.values():
        if _of_strategy(one, value) and isinstance(value, Mapping):
            for key, inner in value.items():
                if key != "strategy":
                    yield from _flat(str(key), inner)


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
        return
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    yield key, text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _varying(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys whose values differ, in order of first appearance."""
    every = dict.fromkeys(key for one in facts for key in one)
    return [key for key in every if len({one.get(key) for one in facts}) > 1]


def _fewest(
    outer: Sequence[Mapping[str, str | None]], own: Sequence[Mapping[str, str]]
) -> tuple[str, ...]:
    """The fewest own keys that, with the conditions, tell all cells apart; all keys that vary if
    none suffice.
    """
    keys = _varying(own)
    for many in range(len(keys) + 1 if len(keys) <= MOST_KEYS else 1):
        for chosen in itertools.combinations(keys, many):
            rows = {
                (*around.values(), *(mine.get(key) for key in chosen))
                for around, mine in zip(outer, own, strict=True)
            }
            if len(rows) == len(own):
                return chosen
    return tuple(keys)
