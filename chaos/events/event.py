"""One event: a line of an event log (``chaos.events.log``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.kinds import REQUIRED, Kind

# json.dumps would create an encoder for each line
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of one actor's log. ``time_ns``: monotonic nanoseconds; ``step``: the training step
    concerned, counted from 1.
    """

    kind: Kind
    actor: str
    seq: int
    time_ns: int
    generation: int
    step: int | None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        """The event as one JSON line, keys in a fixed order, without newline."""
        # The head is formatted by hand: a rank writes two lines per step, and this halves their
        # cost.
        step = "null" if self.step is None else self.step
        return (
            f'{{"kind":"{self.kind}","actor":{_ENCODE(self.actor)},"seq":{self.seq},"time_ns":{self.time_ns},'
            f'"generation":{self.generation},"step":{step},"data":{_ENCODE(self.data)}}}'
        )

    @classmethod
    def from_line(cls, line: str, parse: Callable[[str], Any] = json.loads) -> Event:
        """Parse one line. Raises LogError when it is not a valid event."""
        try:
            raw = parse(line)
            _require_types(raw)
            event = cls(
                kind=Kind(raw["kind"]),
                actor=raw["actor"],
                seq=raw["seq"],
                time_ns=raw["time_ns"],
                generation=raw["generation"],
                step=raw["step"],
                data=raw["data"],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LogError(f"not an event: {line[:120]!r} ({str(error)[:200]})") from error
        require_keys(event.kind, event.data)
        return event


def _require_types(raw: Any) -> None:
    """Raise TypeError for types that no event writer produces; all readers rely on these types."""
    for name in ("seq", "time_ns", "generation", "step"):
        number = raw[name]
        if type(number) is not int and not (name == "step" and number is None):
            raise TypeError(f"{name} is not a whole number")
        if number is not None and not -(2**63) <= number < 2**63:
            raise TypeError(f"{name} is too large")
    if not isinstance(raw["actor"], str) or not isinstance(raw["data"], dict):
        raise TypeError("actor is not text, or data is not a mapping")


def require_keys(kind: Kind, data: Mapping[str, Any]) -> None:
    """Raise LogError if ``data`` lacks a key that ``kind`` must carry."""
    if not REQUIRED[kind] <= data.keys():
        missing = REQUIRED[kind] - data.keys()
        raise LogError(f"event {kind.value} lacks {', '.join(sorted(missing))}")
