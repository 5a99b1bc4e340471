"""Labels of cells in tables, charts and comparisons: the strategy and the fewest facts that tell
cells apart.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
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
    groups: dict[str, list[CellIdentity]] = defaultdict(list)
    conditions: dict[str, dict[str, str]] = {}
    for one in cells:
        groups[one.strategy].append(one)
        others = ((axis, v) for axis, v in one.params.items() if not _of_strategy(one, v))
        conditions[one.id] = dict(pair for axis, v in others for pair in _flat(axis, v))
    shared = _varying([*conditions.values()])
    found: dict[str, str] = {}
    for strategy, members in groups.items():
        outer = [{key: conditions[one.id].get(key) for key in shared} for one in members]
        own = [_own(one) for one in members]
        keys = _fewest(outer, own)
        for one, around, mine in zip(members, outer, own, strict=True):
            facts = [*around.items(), *((key, mine.get(key)) for key in keys)]
            shown = [f"{key}={value}" for key, value in facts if value is not None]
            found[one.id] = " ".join([strategy, *shown])
    times = Counter(found.values())
    return {name: label if times[label] == 1 else name for name, label in found.items()}


def _of_strategy(one: CellIdentity, value: Any) -> bool:
    """Whether a matrix value is the strategy, with or without parameters."""
    return one.strategy in (value, value.get("strategy") if isinstance(value, Mapping) else None)


def _own(one: CellIdentity) -> dict[str, str]:
    """The parameters of a cell's strategy."""
    chosen = (v for v in one.params.values() if _of_strategy(one, v) and isinstance(v, Mapping))
    params = ((str(key), v) for value in chosen for key, v in value.items() if key != "strategy")
    return dict(pair for key, v in params for pair in _flat(key, v))


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
            pairs = zip(outer, own, strict=True)
            if len({(*o.values(), *map(mine.get, chosen)) for o, mine in pairs}) == len(own):
                return chosen
    return tuple(keys)
