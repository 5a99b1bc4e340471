"""Changes of an arm's log: selects lines, changes them, and rebuilds the log as if it had been
written so.

A deliberate forger would also correct the numbers, so this module does: the lines of a file are
sorted by time and numbered, and every recorded last number is the actual one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log, make_log

MS = 1_000_000
ARMS: tuple[Literal["control"], Literal["faulted"]] = ("control", "faulted")
Do = Literal["drop", "double", "move", "actor", "step", "generation", "data"]
How = Literal["set", "scale", "add", "flip", "shorten", "swap"]


class LogEdit(BaseModel):
    """One change. ``kind``, ``actor``, ``generation``, ``step``: select the lines (None: any), and
    ``nth`` selects one of them in order of time (None: all). ``by``: milliseconds for ``move``,
    another actor's name for ``actor``, an increment for ``step`` and ``generation``; for ``data``
    at ``path`` the new value, factor or increment, or the two names to swap in it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: Literal["control", "faulted"] = "faulted"
    do: Do
    kind: Kind | None = None
    actor: str | None = None
    generation: int | None = None
    step: int | None = None
    nth: int | None = None
    path: tuple[str | int, ...] = ()
    how: How = "set"
    by: Any = Field(default=None)

    def plain(self) -> dict[str, Any]:
        """The change as plain data, for files."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def about(self) -> str:
        """What it changes, for people: equal for changes of one kind."""
        where = ".".join(str(part) for part in self.path if isinstance(part, str))
        return " ".join(
            word for word in (self.do, self.kind.value if self.kind else "all", where) if word
        )

    def meets(self, event: Event) -> bool:
        """Whether a line is selected, apart from ``nth``."""
        return (
            self.kind in (None, event.kind)
            and self.actor in (None, event.actor)
            and self.generation in (None, event.generation)
            and self.step in (None, event.step)
        )


class _Line:
    """A line in its present form. ``was``: its original place."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.was = (event.actor, event.seq)


def changed(log: Log, changes: Sequence[LogEdit]) -> Log:
    """The log with all changes, each applied to the lines that it selects in the original log.
    Raises what ``make_log`` raises if values make no sense.
    """
    if not changes:
        return log
    lines = [_Line(event) for event in log.events]
    named = [_named(lines, change) for change in changes]
    for change, these in zip(changes, named, strict=True):
        lines = _made(lines, these, change)
    return _log(log, lines)


def _named(lines: Sequence[_Line], change: LogEdit) -> list[_Line]:
    found = [line for line in lines if change.meets(line.event)]
    return found if change.nth is None else found[change.nth : change.nth + 1]


def _made(lines: list[_Line], these: Sequence[_Line], change: LogEdit) -> list[_Line]:
    chosen = {id(line) for line in these}
    if change.do == "drop":
        return [line for line in lines if id(line) not in chosen]
    if change.do == "double":
        return [
            twin
            for line in lines
            for twin in ([line, _twin(line)] if id(line) in chosen else [line])
        ]
    for line in these:
        line.event = _other(line.event, change)
    return lines


def _twin(line: _Line) -> _Line:
    made = _Line(line.event)
    made.was = ("", -1)
    return made


def _other(event: Event, change: LogEdit) -> Event:
    if change.do == "move":
        return replace(event, time_ns=event.time_ns + round(change.by * MS))
    if change.do == "actor":
        return replace(event, actor=str(change.by))
    if change.do == "step":
        return replace(event, step=(event.step or 0) + change.by)
    if change.do == "generation":
        return replace(event, generation=event.generation + change.by)
    data = copy.deepcopy(dict(event.data))
    _set(data, change)
    return replace(event, data=data)


def _set(data: dict[str, Any], change: LogEdit) -> None:
    """Change the value; no effect if the line has no such place, since lines of one kind differ."""
    if change.how == "swap":
        one, other = change.by
        data.update(swapped(data, {one: other, other: one}))
        return
    holder: Any = data
    for part in change.path[:-1]:
        if not _has(holder, part):
            return
        holder = holder[part]
    last = change.path[-1]
    if _has(holder, last):
        holder[last] = _value(holder[last], change)


def _has(holder: Any, part: str | int) -> bool:
    if isinstance(holder, dict):
        return part in holder
    return isinstance(holder, list) and isinstance(part, int) and -len(holder) <= part < len(holder)


def _value(value: Any, change: LogEdit) -> Any:
    if change.how == "set":
        return copy.deepcopy(change.by)
    if change.how == "flip":
        return not value
    if change.how == "shorten":
        return value[:-1] if isinstance(value, (list, str)) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    made = value * change.by if change.how == "scale" else value + change.by
    return round(made) if isinstance(value, int) else made


def swapped(value: Any, names: Mapping[str, str]) -> Any:
    """A copy with each of these names replaced by another, including keys."""
    if isinstance(value, Mapping):
        return {names.get(key, key): swapped(inner, names) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [swapped(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value


# ---- rebuilding the log


def _log(before: Log, lines: Iterable[_Line]) -> Log:
    actors: dict[str, list[_Line]] = {}
    for line in lines:
        actors.setdefault(line.event.actor, []).append(line)
    places: dict[tuple[str, int], int] = {}
    for mine in actors.values():
        mine.sort(key=lambda line: line.event.time_ns)
        places |= {line.was: number for number, line in enumerate(mine)}
    unseen = _unseen(before)
    last = {name: len(mine) - 1 - unseen.get(name, 0) for name, mine in actors.items()}
    for line in actors.get(ORCHESTRATOR, ()):
        _claim(line, last, places)
    return make_log(_actor(before, name, mine) for name, mine in actors.items())


def _unseen(log: Log) -> dict[str, int]:
    """Number of lines at the end of each process's file that were written after its last number was
    recorded, by name.
    """
    found = {}
    for event in log.of(Kind.PROCESS_EXITED):
        name, number = event.data["process"], event.data["last_seq"]
        if name in log.actors and type(number) is int:
            found[name] = len(log.actors[name].events) - 1 - number
    return found


def _claim(line: _Line, last: Mapping[str, int], places: Mapping[tuple[str, int], int]) -> None:
    """Correct a recorded last number. A process that exited has written all its lines, except those
    that were unseen before as well; a process declared silent is so since the same line.
    """
    event = line.event
    number, name = event.data.get("last_seq"), event.data.get("process")
    if type(number) is not int or not isinstance(name, str):
        return
    if event.kind is Kind.PROCESS_EXITED:
        right = max(-1, last.get(name, -1))
    elif event.kind is Kind.FAILURE_DETECTED:
        right = places.get((name, number), number)
    else:
        return
    if right != number:
        line.event = replace(event, data={**event.data, "last_seq": right})


def _actor(before: Log, name: str, lines: Sequence[_Line]) -> ActorLog:
    events = tuple(
        line.event if line.event.seq == number else replace(line.event, seq=number)
        for number, line in enumerate(lines)
    )
    was = before.actors.get(name)
    ended = bool(events) and events[-1].kind is Kind.ACTOR_ENDED
    return ActorLog(actor=name, events=events, problems=was.problems if was else (), ended=ended)
