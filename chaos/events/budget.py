"""Memory limit for event logs held together, whatever they contain.

File size says little: an empty list of three characters takes 80 bytes of memory. So each event is
charged its real size plus an allowance for what a judge derives from it; lines that are not events
are charged too, for the time they take. The order of reading is fixed, so the same part of a
directory is read everywhere.

A job of 8 ranks over 100,000 steps writes 1.65 million events (470 MB), its control as many: 4.0 GB
by this account. Judging takes 2.7 at the 0.82 kB an event that it took of 50,000 events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from sys import getsizeof
from typing import Any

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.lines import KnownLines

MOST_BYTES = 4 << 30
MOST_TOLD = 100  # problems reported per file
VARIABLE = "CHAOS_LOG_MEMORY_GIB"
# the event itself (180), and what lineage, metrics and checkers keep of it, most in a job of one
# rank (330, measured)
_EVENT = 600
_FILE = 4096
_NAMES = 10_000  # of keys and actors, each kept once; all kinds of events together have some 300
_NAME = 200
_SHORT = 5
_SHARED = 10**_SHORT  # all shared numbers together take 15 MB
_LONG_LINE = 1 << 20
_MOST_VALUES = 1_000_000  # of one line


class Budget:
    """``most``: limit in bytes; None: ``CHAOS_LOG_MEMORY_GIB`` if set, else MOST_BYTES."""

    def __init__(self, most: int | None = None) -> None:
        self.most = _limit() if most is None else most
        self._left = self.most
        self._names: dict[str, str] = {}
        self._decode = json.JSONDecoder(
            object_pairs_hook=self._mapping, parse_int=_Wholes().__getitem__
        ).decode
        self._known = KnownLines()

    @property
    def spent(self) -> bool:
        """Whether the budget is used up, so that nothing more is read."""
        return self._left < 0

    @property
    def charged(self) -> int:
        """Bytes taken so far."""
        return self.most - self._left

    def begins(self) -> None:
        """Charge the start of a file."""
        self._left -= _FILE

    def read(self, raw: bytes, actor: str) -> Event:
        """The event of a line of ``actor``, without its newline. Its memory is charged, whether or
        not it is an event. Raises LogError if it is none.
        """
        if (known := self.read_known([raw], actor)[0]) is not None:
            return known
        length = len(raw)
        try:
            event = Event.from_line(raw.decode(errors="replace"), self._parse)
        except LogError:
            self._left -= _EVENT + length
            raise
        self._left -= _EVENT + max(length, _held(event.data))
        if len(self._names) < _NAMES:  # else its names are not those that all lines share
            self._left -= self._known.learn(event)
        return event

    def read_known(self, raws: Sequence[bytes], actor: str) -> Sequence[Event | None]:
        """The events of lines of ``actor``, without their newlines, as far as they are like lines
        read before; None for one that is not, for which nothing is charged. Many at once take less
        time.
        """
        if max(map(len, raws), default=0) > _LONG_LINE:
            return [None] * len(raws)
        events, held = self._known.read(raws, actor)
        known = [len(raw) for raw, event in zip(raws, events, strict=True) if event is not None]
        self._left -= _EVENT * len(known) + max(held, sum(known))
        return events

    def _parse(self, line: str) -> Any:
        """Parse a line, sharing keys with all other lines. Raises ValueError if it is not JSON."""
        if len(line) > _LONG_LINE and sum(map(line.count, ",[{")) > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values")
        raw = self._decode(line)
        if isinstance(raw, dict) and isinstance(actor := raw.get("actor"), str):
            raw["actor"] = self._name(actor)
        return raw

    def refused(self, name: str) -> str:
        """The message for a file that was not read, or not to its end."""
        return (
            f"{name}: not read: it takes, with the logs before it, more than the"
            f" {self.most / (1 << 30):.3g} GiB of memory for event logs ({VARIABLE} sets them)"
        )

    def _mapping(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = self._names
        try:
            made = {names[key]: value for key, value in pairs}
        except KeyError:
            made = {self._name(key): value for key, value in pairs}
        if len(made) < len(pairs):
            raise ValueError("a key is there twice")
        return made

    def _name(self, name: str) -> str:
        if name not in self._names:
            self._left -= getsizeof(name) + _NAME
            if len(self._names) >= _NAMES:
                return name
            self._names[name] = name
        return self._names[name]


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


class _Wholes(dict[str, int]):
    """Small integers by their text, each stored once: steps, and sample ids, which repeat in each
    epoch.
    """

    def __missing__(self, text: str) -> int:
        value = int(text)
        if len(text) <= _SHORT:
            self[text] = value
        return value


def _held(data: Mapping[str, Any]) -> int:
    """Memory of a parsed value in bytes, without shared numbers."""
    total, todo = 0, [data]
    while todo:
        one: Any = todo.pop()
        kind = type(one)
        if kind is int and 0 <= one < _SHARED:
            continue
        total += getsizeof(one)
        if kind is dict:
            todo.extend(one.values())
        elif kind is list:
            todo.extend(one)
    return total


def _limit() -> int:
    try:
        return int(float(os.environ[VARIABLE]) * (1 << 30))
    except (KeyError, ValueError, OverflowError):
        return MOST_BYTES
