"""Reads lines of event logs, and limits the memory of those that are held together.

A line is charged before it is read: twice its text, an allowance for the event and for what a judge
derives from it, and more for a line of far more values than an event has. Lines that are not events
are charged too, for the time they take. The order of reading is fixed, so the same part of a
directory is read everywhere.

A job of 8 ranks over 100,000 steps writes 1.65 million events (470 MB), its control as many: 3.9 GB
by this account.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import REQUIRED

_DECODE: Callable[[bytes], Event] | None
_REFUSED: tuple[type[Exception], ...]
try:
    import msgspec
except ImportError:  # a machine with a GPU may have only what training needs
    _DECODE, _REFUSED = None, ()
else:
    _DECODE = msgspec.json.Decoder(Event).decode
    _REFUSED = (msgspec.MsgspecError, ValueError, RecursionError)

MOST_BYTES = 4 << 30
MOST_TOLD = 100  # problems reported per file
VARIABLE = "CHAOS_LOG_MEMORY_GIB"
# the event itself (180), and what lineage, metrics and checkers keep of it, most in a job of one
# rank (330, measured)
_EVENT = 600
_FILE = 4096
_USUAL_VALUES = 60
_VALUE = 40
_LARGEST = 2**63 - 1
_OWN_KEYS = 7  # of an event
_set_actor = Event.__dict__["actor"].__set__  # events are frozen


class Budget:
    """``most``: limit in bytes; None: ``CHAOS_LOG_MEMORY_GIB`` if set, else MOST_BYTES."""

    def __init__(self, most: int | None = None) -> None:
        self.most = _limit() if most is None else most
        self.charged = 0

    @property
    def spent(self) -> bool:
        """Whether the budget is used up, so that nothing more is read."""
        return self.charged > self.most

    def begins(self) -> None:
        """Charge the start of a file."""
        self.charged += _FILE

    def read(self, raw: bytes, actor: str) -> Event | None:
        """The event of a line in the file of ``actor``, without its newline; None: the budget is
        used up. Raises LogError if it is no event.
        """
        values = raw.count(b",") + 2 * (raw.count(b"[") + raw.count(b"{"))
        self.charged += _EVENT + 2 * len(raw) + _VALUE * max(0, values - _USUAL_VALUES)
        return None if self.spent else event_of(raw, actor)

    def refused(self, name: str) -> str:
        """The message for a file that was not read, or not to its end."""
        return (
            f"{name}: not read: it takes, with the logs before it, more than the"
            f" {self.most / (1 << 30):.3g} GiB of memory for event logs ({VARIABLE} sets them)"
        )


def event_of(raw: bytes, actor: str) -> Event:
    """The event of a line. What msgspec refuses, the exact reader decides, so that what is refused,
    and with which words, does not depend on whether msgspec is installed. Raises LogError.
    """
    if _DECODE is not None:
        try:
            event = _DECODE(raw)
        except _REFUSED:
            return _exactly(raw)
        numbers = event.seq | event.time_ns | event.generation | (event.step or 0)
        complete = REQUIRED[event.kind] <= event.data.keys()
        # of a key that is there twice, msgspec keeps the last
        once = raw.count(b'":') == _OWN_KEYS + _keys_in(event.data)
        if complete and once and event.actor == actor and 0 <= numbers <= _LARGEST:
            _set_actor(event, actor)  # one text for all lines
            return event
    return _exactly(raw)


def _keys_in(data: Mapping[str, Any]) -> int:
    """How many keys a mapping and those in it have."""
    return len(data) + sum(_keys_in(value) for value in data.values() if type(value) is dict)


def _exactly(raw: bytes) -> Event:
    return Event.from_line(raw.decode(errors="replace"), _PARSE)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice")
    return made


_PARSE = json.JSONDecoder(object_pairs_hook=_mapping).decode


class FileProblems:
    """Problems of a file: the first ones, and the count of the rest."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._more = 0

    def add(self, problem: str) -> None:
        """Add a problem."""
        if len(self._first) < MOST_TOLD:
            self._first.append(problem)
        else:
            self._more += 1

    def all(self, name: str) -> tuple[str, ...]:
        """The problems kept, and the count of the rest."""
        return (*self._first, *([f"{name}: {self._more} more problems"] if self._more else []))


def _limit() -> int:
    try:
        return int(float(os.environ[VARIABLE]) * (1 << 30))
    except (KeyError, ValueError, OverflowError):
        return MOST_BYTES
