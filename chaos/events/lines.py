"""Reads the lines of an event log that are like lines read before, fast, with msgspec.

Whatever msgspec accepts, ``json`` reads alike; what it refuses, or has not seen the like of, the
exact reader decides (``chaos.events.budget``), so that what is refused, and with which words, does
not depend on it. Without msgspec, the exact reader reads everything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
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
_SIZES = {float: 24, int: 32}
"""Bytes of values. What a larger whole number than 2**60 takes more is less than its text is long,
for which the line is charged.
"""
_CONTAINERS = frozenset({list, dict})
_set = object.__setattr__  # events are frozen


def _has_long_number(raw: bytes) -> bool:
    """Whether a line may have a number that ``int`` refuses for its length. msgspec does not read
    the values of keys that an event does not have.
    """
    most = sys.get_int_max_str_digits()
    if not 0 < most < len(raw):
        return False
    # every 64th byte: to look at each takes longer than to read the line
    return re.search(rb"[0-9]{%d}" % (most // 64), raw[::64]) is not None


class _Shape:
    """Mappings with the same keys. ``keys``: each the one object that all lines share, from the
    first that msgspec made (it makes most keys once); ``kinds``: of the events whose data they are.
    """

    __slots__ = ("keys", "kinds")

    def __init__(self) -> None:
        self.keys: tuple[str, ...] = ()
        self.kinds: list[Kind] = []


class _Form:
    """Mappings with the same keys and types of values. ``held``: bytes that one takes with its
    values, but for texts and containers; ``texts``, ``mappings``, ``lists``: keys of such values.
    """

    __slots__ = ("held", "keys", "kinds", "lists", "longest", "mappings", "texts")

    def __init__(self, shape: _Shape, mapping: Mapping[str, Any]) -> None:
        self.keys, self.kinds = shape.keys, shape.kinds
        self.longest = max(map(getsizeof, shape.keys), default=0)
        values = mapping.items()
        self.texts, self.mappings, self.lists = (
            tuple(key for key, value in values if type(value) is kind) for kind in (str, dict, list)
        )
        self.held = getsizeof(mapping) + sum(_SIZES.get(type(v), 0) for v in mapping.values())


class KnownLines:
    """Which keys the data of events have had."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._wholes: list[int] = []

    def read(self, raw: bytes, actor: str) -> tuple[Event, int] | None:
        """The event of a line and the memory of its data in bytes; None: not like any before, or
        not of ``actor``.
        """
        if DECODE is None or _has_long_number(raw):
            return None
        try:
            event = DECODE(raw)
        except REFUSED:
            return None
        data: Any = event.data
        form = self._forms.get((*data, *map(type, data.values()))) or self._form(data)
        if form is None or event.kind not in form.kinds or event.actor != actor:
            return None
        numbers = event.seq | event.time_ns | event.generation | (event.step or 0)
        if not 0 <= numbers <= _LARGEST:
            return None
        _set(event, "actor", actor)
        held = self._settle(data, form, _DEEPEST)
        return None if held is None else (event, held)

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

    def _form(self, mapping: Mapping[str, Any]) -> _Form | None:
        """The form of a mapping whose shape is known."""
        shape = self._shapes.get(tuple(mapping))
        if shape is None:
            return None
        shape.keys = shape.keys or tuple(mapping)
        form = _Form(shape, mapping)
        if len(self._forms) < _MOST_SHAPES:
            self._forms[(*mapping, *map(type, mapping.values()))] = form
        return form

    def _settle(self, holder: dict[str, Any], form: _Form, deepest: int) -> int | None:
        """Share the small numbers of long lists in a mapping; returns the bytes that it holds,
        None: not like any before.
        """
        # msgspec makes most keys once: those that it had to make again are this mapping's own
        held: int = form.held + form.longest * (len(holder) - sum(map(is_, holder, form.keys)))
        for key in form.texts:
            held += getsizeof(holder[key])
        for key in form.lists:
            value = holder[key]
            kinds = set(map(type, value))
            held += getsizeof(value)
            if len(value) < _FEW and not kinds & _CONTAINERS:
                held += sum(map(getsizeof, value))
            elif kinds == _INTEGERS and min(value) >= 0 and max(value) < _SHARED:
                shared = self._wholes or self._numbers()
                holder[key] = [shared[number] for number in value]
            elif kinds & _CONTAINERS:
                return None
            else:
                held += sum(map(getsizeof, value))
        for key in form.mappings:
            value = holder[key]
            inside = self._forms.get((*value, *map(type, value.values()))) or self._form(value)
            if inside is None or not deepest:
                return None
            inner = self._settle(value, inside, deepest - 1)
            if inner is None:
                return None
            held += inner
        return held

    def _numbers(self) -> list[int]:
        self._wholes = list(range(_SHARED))
        return self._wholes
