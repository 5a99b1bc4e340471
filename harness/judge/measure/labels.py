"""What a cell is called in tables, charts and comparisons: its strategy, with as little beside it
as tells it apart.
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
class Named:
    """A cell: its id, its strategy (or program), and what the matrix chose for it."""

    id: str
    strategy: str
    params: Mapping[str, Any]


def labels(cells: Iterable[Named]) -> dict[str, str]:
    """Cell id -> label, no two alike.

    An axis that is not of the strategy (``ranks: [2, 4]``) is in every label if its value differs
    between any two cells, as it is a condition of the comparison. Parameters of the strategy are
    there only where two cells share one: the fewest of them that tell all of its cells apart. A
    cell for which that does not do keeps its id.
    """
    known = list(cells)
    conditions = {one.id: dict(_conditions(one)) for one in known}
    shared = _varying(list(conditions.values()))
    groups: dict[str, list[Named]] = defaultdict(list)
    for one in known:
        groups[one.strategy].append(one)
    found: dict[str, str] = {}
    for strategy, members in groups.items():
        outer = [{key: conditions[one.id].get(key) for key in shared} for one in members]
        own = [dict(_own(one)) for one in members]
        keys = _fewest(outer, own)
        for one, around, mine in zip(members, outer, own, strict=True):
            facts = [*around.items(), *((key, mine.get(key)) for key in keys)]
            told = [f"{key}={value}" for key, value in facts if value is not None]
            found[one.id] = " ".join([strategy, *told])
    return {name: label if _unique(found, label) else name for name, label in found.items()}


def _unique(found: Mapping[str, str], label: str) -> bool:
    return sum(other == label for other in found.values()) == 1


def _of_strategy(one: Named, value: Any) -> bool:
    """Whether a value of the matrix is the strategy, with its parameters or without."""
    return value == one.strategy or (
        isinstance(value, Mapping) and value.get("strategy") == one.strategy
    )


def _conditions(one: Named) -> Iterator[tuple[str, str]]:
    for axis, value in one.params.items():
        if not _of_strategy(one, value):
            yield from _flat(axis, value)


def _own(one: Named) -> Iterator[tuple[str, str]]:
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
    """Keys whose value is not the same in all, in the order in which they are first seen."""
    every = dict.fromkeys(key for one in facts for key in one)
    return [key for key in every if len({one.get(key) for one in facts}) > 1]


def _fewest(
    outer: Sequence[Mapping[str, str | None]], own: Sequence[Mapping[str, str]]
) -> tuple[str, ...]:
    """The fewest own keys that, with the conditions, tell all cells apart; all that vary, where
    none do.
    """
    keys = _varying(own)
    for many in range(len(keys) + 1 if len(keys) <= MOST_KEYS else 1):
        for chosen in itertools.combinations(keys, many):
            told = {
                (*around.values(), *(mine.get(key) for key in chosen))
                for around, mine in zip(outer, own, strict=True)
            }
            if len(told) == len(own):
                return chosen
    return tuple(keys)
