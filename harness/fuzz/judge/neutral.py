"""Changes of a log that do not alter its content, so that the verdict must not change either."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainchaos.chaos.events.log import ActorLog, Event, Log, make_log

SHIFT_NS = 3_600 * 10**9
"""The shift of all times if the machine's clock had started at another time."""
_OF_DAY = "wall_ns"
"""The one time in a line that is not from that clock."""


def later(log: Log) -> Log:
    """The same log from a machine started an hour earlier: all times are later by that."""
    return make_log(_later(actor) for actor in log.actors.values())


def _later(actor: ActorLog) -> ActorLog:
    return replace(actor, events=tuple(_shifted(event) for event in actor.events))


def _shifted(event: Event) -> Event:
    data = {
        key: value + SHIFT_NS
        if key.endswith("_ns") and key != _OF_DAY and type(value) is int
        else value
        for key, value in event.data.items()
    }
    return replace(event, time_ns=event.time_ns + SHIFT_NS, data=data)


def _backwards(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _backwards(value[key]) for key in reversed(value)}
    return [_backwards(inner) for inner in value] if isinstance(value, list) else value


WRITTEN: Mapping[str, Callable[[str], str]] = {
    "keys in another order": lambda line: json.dumps(_backwards(json.loads(line))),
    "spaces between": lambda line: json.dumps(json.loads(line), separators=(" , ", " : ")),
}
"""Alternative formats of a line."""
