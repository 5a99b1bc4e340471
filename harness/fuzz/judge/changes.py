"""Draws changes of a log; rarely tried kinds of lines and changes are preferred."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.fuzz.draw.draw import Dice
from trainchaos.harness.fuzz.judge.lines import ARMS, LogEdit

COUNTS = (1, 1, 1, 1, 2, 3)
"""Number of changes at once."""
DONE = ("drop", "double", "move", "actor", "step", "generation", "data", "data", "data")
SCOPES = ("one", "one", "ranks", "mine", "kind", "actor")
"""Which lines: one line, all ranks' lines of its step, all of its actor and kind, of its kind, or
of its actor.
"""
IN_CONTROL = 0.2
LEAST_MS, MOST_MS = 0.1, 5000.0
FACTORS = (0, 0.5, 0.9, 1.1, 2, -1)
MORE = (-1, 1, 2, -5, 100)


def draw(dice: Dice, logs: dict[str, Log]) -> list[LogEdit]:
    """Some changes of one of these logs; ``logs``: by arm."""
    arm = ARMS[0] if dice.chance(IN_CONTROL) else ARMS[1]
    return [_one(dice, logs[arm], arm) for _ in range(dice.rng.choice(COUNTS))]


def _one(dice: Dice, log: Log, arm: str) -> LogEdit:
    rng = dice.rng
    kind = Kind(dice.pick("line", sorted({event.kind.value for event in log.events})))
    event = rng.choice(list(log.of(kind)))
    do = dice.pick("change", DONE)
    scope = dice.pick("scope", SCOPES)
    if scope == "actor" and do not in ("drop", "move"):
        scope = "mine"
    fields: dict[str, Any] = {"arm": arm, "do": do, **_which(log, event, scope)}
    if do == "move":
        size = 10 ** rng.uniform(-1, 3.7)
        fields["by"] = float(f"{rng.choice((-1, 1)) * min(max(size, LEAST_MS), MOST_MS):.3g}")
    elif do == "actor":
        fields["by"] = rng.choice(
            [name for name in sorted(log.actors) if name != event.actor] or [event.actor]
        )
    elif do in ("step", "generation"):
        fields["by"] = rng.choice(MORE[:4])
    elif do == "data":
        fields |= _data(dice, log, event)
    return LogEdit.model_validate(fields)


def _which(log: Log, event: Event, scope: str) -> dict[str, Any]:
    if scope == "actor":
        return {"actor": event.actor}
    if scope == "kind":
        return {"kind": event.kind}
    if scope == "ranks":
        return {"kind": event.kind, "generation": event.generation, "step": event.step}
    which: dict[str, Any] = {"kind": event.kind, "actor": event.actor}
    if scope == "mine":
        return which
    which |= {"generation": event.generation, "step": event.step}
    alike = [other for other in log.of(event.kind) if LogEdit(do="drop", **which).meets(other)]
    return which if len(alike) == 1 else {**which, "nth": alike.index(event)}


def _data(dice: Dice, log: Log, event: Event) -> dict[str, Any]:
    """The change of a value in a line."""
    rng = dice.rng
    places = list(_places(dict(event.data), (), rng))
    names = [name for name in log.actors if name != event.actor]
    if not places or (len(names) > 1 and rng.random() < 0.1):
        return {"path": (), "how": "swap", "by": rng.sample(sorted(log.actors), 2)}
    top = dice.pick(f"key of {event.kind.value}", sorted({str(path[0]) for path, _ in places}))
    path, value = rng.choice([one for one in places if one[0][0] == top])
    return {"path": path, **_otherwise(rng, log, event, path, value)}


def _places(
    value: Any, path: tuple[str | int, ...], rng: random.Random
) -> Iterator[tuple[Any, Any]]:
    """Every value below a mapping; for a list, itself and one element."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key), rng)
    elif isinstance(value, list) and value:
        number = rng.randrange(len(value))
        yield from _places(value[number], (*path, number), rng)


def _otherwise(
    rng: random.Random, log: Log, event: Event, path: Sequence[str | int], value: Any
) -> dict[str, Any]:
    others = [found for found in _seen(log, event.kind, path) if found != value]
    if others and (value is None or rng.random() < 0.3):
        return {"how": "set", "by": rng.choice(others)}
    if isinstance(value, bool):
        return {"how": "flip"}
    if isinstance(value, int):
        by = rng.choice(MORE)
        return (
            {"how": "add", "by": by}
            if rng.random() < 0.7
            else {"how": "scale", "by": rng.choice(FACTORS)}
        )
    if isinstance(value, float):
        return {"how": "scale", "by": rng.choice(FACTORS)}
    if isinstance(value, str):
        names = [name for name in sorted(log.actors) if name != value]
        return (
            {"how": "set", "by": rng.choice(names)} if value in log.actors else {"how": "shorten"}
        )
    if isinstance(value, list) and value:
        return {"how": "shorten"} if rng.random() < 0.7 else {"how": "set", "by": []}
    return {"how": "set", "by": None if value is not None else rng.choice((0, 1, "x"))}


def _seen(log: Log, kind: Kind, path: Sequence[str | int]) -> list[Any]:
    """Values at that path in other lines of the kind, without duplicates."""
    found: list[Any] = []
    for event in log.of(kind):
        value: Any = event.data
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and value not in found:
            found.append(value)
        if len(found) >= 20:
            break
    return found
