"""Reads the playbook's file. Strict: an entry that is not as it should be is an error, and nothing
is guessed.
"""

from __future__ import annotations

import re
import signal
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from trainchaos.chaos.errors import ChaosError
from trainchaos.recovery.playbook.entry import (
    LEAVES_THE_DEVICE,
    Action,
    Cause,
    Entry,
    Likelihood,
    Owner,
    Tells,
)

FILE = Path(__file__).with_name("playbook.toml")
REQUIRED = ("id", "meaning", "cause", "owner", "action", "sources")
OPTIONAL = ("likelihood", "move", "tells", "note", "example", "unless", "explains", "orders")
SIGNS = ("xid", "sxid", "signal", "exit", "pattern")
LOWEST = {"xid": 1, "sxid": 10000, "exit": 0}
HIGHEST = {"xid": 9999, "sxid": 99999, "exit": 255}
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_Word = TypeVar("_Word", bound=StrEnum)


class PlaybookError(ChaosError):
    """The playbook's file is wrong; the message names file and entry."""


class _Wrong(Exception):
    """What is wrong with one entry."""


def read_entries(path: Path = FILE) -> tuple[Entry, ...]:
    """Every entry of a file, in its order. Raises PlaybookError."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlaybookError(f"{path}: cannot be read: {error}") from error
    if unknown := [key for key in tree if key not in ("sources", "entry")]:
        raise PlaybookError(f"{path}: unknown key {unknown[0]!r}")
    sources, rows = tree.get("sources", {}), tree.get("entry", [])
    if not isinstance(rows, list) or not _are_addresses(sources):
        raise PlaybookError(f"{path}: needs [sources] with addresses, and [[entry]] tables")
    found: list[Entry] = []
    taken: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        name = row.get("id") if isinstance(row, dict) else None
        try:
            entry = _entry(row, sources)
            _take(entry, taken)
        except _Wrong as wrong:
            where = f"entry {name!r}" if isinstance(name, str) else f"entry number {number}"
            raise PlaybookError(f"{path}: {where}: {wrong}") from wrong
        found.append(entry)
    ids = {entry.id for entry in found}
    for entry in found:
        if strange := [name for name in entry.explains if name not in ids]:
            raise PlaybookError(f"{path}: entry {entry.id!r}: explains {strange[0]!r}: no such id")
    if unused := sorted({*sources.values()} - {one for entry in found for one in entry.sources}):
        raise PlaybookError(f"{path}: no entry names the source {unused[0]}")
    return tuple(found)


def _are_addresses(sources: object) -> bool:
    return isinstance(sources, dict) and all(
        isinstance(one, str) and one.startswith("https://") for one in sources.values()
    )


def _entry(row: object, sources: Mapping[str, str]) -> Entry:
    if not isinstance(row, dict):
        raise _Wrong("it is no table")
    if unknown := [key for key in row if key not in (*REQUIRED, *OPTIONAL, *SIGNS)]:
        raise _Wrong(f"unknown key {unknown[0]!r}")
    if missing := [key for key in REQUIRED if key not in row]:
        raise _Wrong(f"{missing[0]!r} is missing")
    signs = [key for key in SIGNS if key in row]
    if len(signs) != 1:
        raise _Wrong(f"it needs one of {', '.join(SIGNS)}, and has {len(signs)}")
    entry = Entry(
        id=_text(row, "id"),
        meaning=_text(row, "meaning"),
        cause=_word(row, "cause", Cause),
        owner=_word(row, "owner", Owner),
        likelihood=_word(row, "likelihood", Likelihood, Likelihood.STATED),
        action=_word(row, "action", Action),
        move=_flag(row, "move"),
        tells=_word(row, "tells", Tells, Tells.CAUSE),
        sources=_sources(row, sources),
        note=_text(row, "note") if "note" in row else "",
        xids=_numbers(row, "xid"),
        sxids=_numbers(row, "sxid"),
        signal=_signal(row),
        exits=_numbers(row, "exit"),
        pattern=_pattern(row, "pattern"),
        example=_text(row, "example") if "example" in row else "",
        unless=_pattern(row, "unless"),
        explains=_names(row, "explains"),
        orders=_flag(row, "orders"),
    )
    _check(entry)
    return entry


def _check(entry: Entry) -> None:
    """What the fields must be together."""
    if not _ID.fullmatch(entry.id):
        raise _Wrong("an id is lower-case words with dashes between them")
    if entry.move and entry.action not in LEAVES_THE_DEVICE:
        raise _Wrong(f"it moves work off the device, and its action is {entry.action.value!r}")
    if entry.owner is Owner.UNCLEAR and entry.likelihood is not Likelihood.STATED:
        raise _Wrong("an unclear owner has no likelihood")
    if entry.pattern is None:
        if entry.example:
            raise _Wrong("only a pattern has an example")
    elif not entry.example:
        raise _Wrong("a pattern needs an example")
    elif not entry.finds(entry.example) or not entry.speaks_of(entry.example):
        raise _Wrong("its pattern does not find its example")


def _take(entry: Entry, taken: dict[str, str]) -> None:
    """Note what the entry is found by. Raises _Wrong if another has it."""
    signs = [f"id {entry.id}", *(f"XID {n}" for n in entry.xids)]
    signs += [*(f"SXid {n}" for n in entry.sxids), *(f"exit code {n}" for n in entry.exits)]
    signs += [f"signal {entry.signal}"] if entry.signal else []
    for sign in signs:
        if sign in taken:
            raise _Wrong(f"{sign} is that of {taken[sign]!r} already")
        taken[sign] = entry.id


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value.strip() or value != value.strip() or "\n" in value:
        raise _Wrong(f"{key!r} needs one line of text")
    return value


def _flag(row: Mapping[str, Any], key: str) -> bool:
    value = row.get(key, False)
    if not isinstance(value, bool):
        raise _Wrong(f"{key!r} needs true or false")
    return value


def _word(
    row: Mapping[str, Any], key: str, words: type[_Word], default: _Word | None = None
) -> _Word:
    value = row.get(key, default)
    try:
        return words(value)
    except ValueError:
        raise _Wrong(f"{key!r} is {value!r}, and must be one of {', '.join(words)}") from None


def _sources(row: Mapping[str, Any], sources: Mapping[str, str]) -> tuple[str, ...]:
    names = row["sources"]
    if not isinstance(names, list) or not names:
        raise _Wrong("'sources' needs a list of names")
    if unknown := [name for name in names if name not in sources]:
        raise _Wrong(f"[sources] has no {unknown[0]!r}")
    return tuple(sources[name] for name in names)


def _numbers(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    if key not in row:
        return ()
    value, low, high = row[key], LOWEST[key], HIGHEST[key]
    right = isinstance(value, list) and all(type(n) is int and low <= n <= high for n in value)
    if not right or not value or len({*value}) != len(value):
        raise _Wrong(f"{key!r} needs a list of different numbers from {low} to {high}")
    return tuple(value)


def _signal(row: Mapping[str, Any]) -> str:
    if "signal" not in row:
        return ""
    name = _text(row, "signal")
    if name not in signal.Signals.__members__:
        raise _Wrong(f"{name!r} is no signal")
    return name


def _names(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = row.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _Wrong(f"{key!r} needs a list of names")
    return tuple(value)


def _pattern(row: Mapping[str, Any], key: str) -> re.Pattern[str] | None:
    """Case counts, and ``^`` and ``$`` stand for the ends of a line."""
    if key not in row:
        return None
    try:
        found = re.compile(_text(row, key), re.MULTILINE)
    except re.error as error:
        raise _Wrong(f"{key!r} is no regular expression: {error}") from error
    if found.search(""):
        raise _Wrong(f"{key!r} finds an empty line")
    return found
