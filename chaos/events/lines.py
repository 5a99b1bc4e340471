"""Reads the lines of an event log that are like lines read before, fast, with msgspec.

Whatever msgspec accepts, ``json`` reads alike; what it refuses, or has not seen the like of, the
exact reader decides (``chaos.events.budget``), so that what is refused, and with which words, does
not depend on it. Without msgspec, the exact reader reads everything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle
from operator import is_
from sys import getsizeof
from typing import Any

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind

DECODE: Callable[[bytes], Event] | None
REFUSED: tuple[type[Exception], ...]
try:
    import msgspec
except ImportError:  # a machine with a GPU may have only what training needs
    DECODE, REFUSED = None, ()
else:
    DECODE = msgspec.json.Decoder(Event).decode
    REFUSED = (msgspec.MsgspecError, ValueError, RecursionError)

_LARGEST = 2**63 - 1
_MOST_SHAPES = 2_000
_MOST_KEYS = 64
_SHAPE = 400  # bytes of its entry, beside its tuples
_DEEPEST = 4
_SHARED = 100_000
_FEW = 8  # numbers: to share them takes longer than it is worth
_INTEGERS = {int}
_USUAL = 2**30  # smaller ones take as much memory as 1
_SIZES = {float: 24, int: 32}
"""Bytes of values. What a larger whole number than 2**60 takes more is less than its text is
long, for which the line is charged.
"""
_CONTAINERS = frozenset({list, dict})
_NAMED = b'":'
_OWN_KEYS = 7  # of an event
_Data = dict[str, Any]
_set_actor = Event.__dict__["actor"].__set__  # events are frozen


def _with_long_numbers(raws: Sequence[bytes]) -> set[int]:
    """Which lines may have a number that ``int`` refuses for its length. msgspec does not read the
    values of keys that an event does not have.
    """
    most = sys.get_int_max_str_digits()
    if not 0 < most < max(map(len, raws), default=0):
        return set()
    # every 64th byte: to look at each takes longer than to read the line
    long = re.compile(rb"[0-9]{%d}" % (most // 64))
    return {n for n, raw in enumerate(raws) if len(raw) > most and long.search(raw[::64])}


def _decoded(raws: Sequence[bytes]) -> list[Event | None]:
    """The events of lines; None for one that msgspec refuses."""
    if DECODE is None:
        return [None] * len(raws)
    try:
        return list(map(DECODE, raws))
    except REFUSED:
        if len(raws) == 1:
            return [None]
    return [event for raw in raws for event in _decoded([raw])]


def _named_in(data: Mapping[str, Any]) -> int:
    """How many keys a mapping and those in it have."""
    inner = (value for value in data.values() if type(value) is dict)
    return len(data) + sum(map(_named_in, inner))


def _size_of_short(lists: Sequence[list[Any]]) -> int:
    """What lists hold in bytes, if all are short and of numbers of the usual size; else 0."""
    values = list(chain.from_iterable(lists))
    usual = set(map(type, values)) == _INTEGERS and min(values) >= 0 and max(values) < _USUAL
    if not usual or max(map(len, lists)) >= _FEW:
        return 0
    numbers = (len(values) - values.count(0)) * getsizeof(1) + values.count(0) * getsizeof(0)
    return sum(map(getsizeof, lists)) + numbers


class _Shape:
    """Mappings with the same keys. ``keys``: each the one object that all lines share, from the
    first that msgspec made (it makes most keys once); ``kinds``: of the events whose data they are.
    """

    __slots__ = ("keys", "kinds")

    def __init__(self) -> None:
        self.keys: tuple[str, ...] = ()
        self.kinds: list[Kind] = []


class KnownLines:
    """Which keys the data of events have had."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._wholes: list[int] = []

    def read(self, raws: Sequence[bytes], actor: str) -> tuple[list[Event | None], int]:
        """The event of each line, and the memory of their data in bytes; None for one that is not
        like any before, or not of ``actor``.
        """
        found: list[Event | None] = [None] * len(raws)
        alike: dict[tuple[Any, ...], list[int]] = {}
        events, doubtful = _decoded(raws), _with_long_numbers(raws)
        for place, event in enumerate(events):
            if event is None or event.actor != actor or place in doubtful:
                continue
            if raws[place].count(_NAMED) != _OWN_KEYS + _named_in(event.data):
                continue  # a key may be there twice, of which msgspec keeps the last
            numbers = event.seq | event.time_ns | event.generation | (event.step or 0)
            if not 0 <= numbers <= _LARGEST:
                continue
            _set_actor(event, actor)
            if (known := alike.get(like := (event.kind, *event.data))) is None:
                alike[like] = [place]
            else:
                known.append(place)
        held = 0
        for (kind, *keys), places in alike.items():
            shape = self._shapes.get(tuple(keys))
            if shape is None or kind not in shape.kinds:
                continue
            datas: list[Any] = [events[place].data for place in places]  # type: ignore[union-attr]
            if (taken := self._settle(datas, shape, _DEEPEST)) is not None:
                held += taken
                for place in places:
                    found[place] = events[place]
        return found, held

    def learn(self, event: Event) -> int:
        """Remember the keys of an event from the exact reader; returns the bytes that takes."""
        todo: list[tuple[Any, Kind | None]] = [(event.data, event.kind)]
        taken = 0
        while todo:
            mapping, kind = todo.pop()
            keys = tuple(mapping)
            if len(keys) > _MOST_KEYS:
                continue
            if keys not in self._shapes:
                if len(self._shapes) >= _MOST_SHAPES:
                    continue
                self._shapes[keys] = _Shape()
                taken += getsizeof(keys) + _SHAPE
            if kind is not None and keys and kind not in self._shapes[keys].kinds:
                self._shapes[keys].kinds.append(kind)
            todo += [(value, None) for value in mapping.values() if type(value) is dict]
        return taken

    def _settle(self, holders: Sequence[_Data], shape: _Shape, deepest: int) -> int | None:
        """Share the small numbers of long lists in mappings of one shape; returns the bytes that
        they hold, None: one is not like any before.
        """
        shape.keys = keys = shape.keys or tuple(holders[0])
        # msgspec makes most keys once: those that it had to make again are these mappings' own
        once = sum(map(is_, chain.from_iterable(holders), cycle(keys)))
        again = len(keys) * len(holders) - once
        held = len(holders) * getsizeof(holders[0])
        held += again * max(map(getsizeof, keys)) if again else 0
        for key, column in zip(keys, zip(*map(dict.values, holders), strict=True), strict=True):
            kinds = set(map(type, column))
            if kinds & _SIZES.keys():
                held += max(_SIZES.get(kind, 0) for kind in kinds) * len(column)
            if str in kinds:
                held += sum(getsizeof(value) for value in column if type(value) is str)
            if dict in kinds:
                taken = self._settle_all([v for v in column if type(v) is dict], deepest - 1)
                if taken is None:
                    return None
                held += taken
            if kinds == {list} and (short := _size_of_short(column)):
                held += short
            elif list in kinds:
                for holder in holders:
                    taken = self._settle_list(holder, key) if type(holder[key]) is list else 0
                    if taken is None:
                        return None
                    held += taken
        return held

    def _settle_all(self, values: Sequence[_Data], deepest: int) -> int | None:
        """As ``_settle``, for mappings that may differ in shape."""
        if deepest < 0:
            return None
        alike: dict[tuple[str, ...], list[_Data]] = {}
        for value in values:
            alike.setdefault(tuple(value), []).append(value)
        held = 0
        for keys, same in alike.items():
            shape = self._shapes.get(keys)
            taken = None if shape is None else self._settle(same, shape, deepest)
            if taken is None:
                return None
            held += taken
        return held

    def _settle_list(self, holder: _Data, key: str) -> int | None:
        """As ``_settle``, for a list in a mapping; None: it holds containers."""
        value = holder[key]
        kinds = set(map(type, value))
        if kinds & _CONTAINERS:
            return None
        if kinds == _INTEGERS and len(value) >= _FEW and min(value) >= 0 and max(value) < _SHARED:
            shared = self._wholes or self._numbers()
            holder[key] = [shared[number] for number in value]
            return getsizeof(value)
        return getsizeof(value) + sum(map(getsizeof, value))

    def _numbers(self) -> list[int]:
        self._wholes = list(range(_SHARED))
        return self._wholes
