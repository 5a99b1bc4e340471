"""An arm's log as rows that can be changed, and made a log again as if it had been written so."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log, make_log

MS = 1_000_000
FAIL, OPEN = "fail", "inconclusive"
_ORDER = (FAIL, OPEN)


@dataclass
class Row:
    """One line of a log, still without its number."""

    kind: Kind
    actor: str
    time_ns: int
    generation: int
    step: int | None
    data: dict[str, Any]


class Tape:
    """The rows of one arm, in the order of their actors' files. ``other``: the tape of the control
    arm.

    When it is made a log again, each actor's rows are sorted by time and numbered, and exits claim
    the right last number: who changes a log on purpose does that too. ``keep_numbers``: not so,
    numbers are as they were.
    """

    def __init__(self, rows: Iterable[Row], other: Tape | None = None) -> None:
        self.rows = list(rows)
        self.other = other
        self.keep_numbers = False
        self._numbers = {id(row): n for n, row in enumerate(self.rows)}
        self._kept = {id(row): row for row in self.rows}

    @classmethod
    def of(cls, actors: Mapping[str, tuple[Event, ...]], other: Tape | None = None) -> Tape:
        """From what files hold."""
        rows = [
            Row(e.kind, e.actor, e.time_ns, e.generation, e.step, copy.deepcopy(dict(e.data)))
            for events in actors.values()
            for e in events
        ]
        return cls(rows, other)

    def find(
        self,
        kind: Kind | None = None,
        *,
        actor: str | None = None,
        step: int | None = None,
        generation: int | None = None,
        after: int | None = None,
        **data: Any,
    ) -> list[Row]:
        """Rows of a kind in time order, narrowed; ``after``: a time; ``data``: values of theirs. At
        least one: a mutation that changes nothing proves nothing. Raises AssertionError.
        """
        found = [
            row
            for row in self.rows
            if kind in (None, row.kind)
            and actor in (None, row.actor)
            and step in (None, row.step)
            and generation in (None, row.generation)
            and (after is None or row.time_ns > after)
            and all(row.data.get(key) == value for key, value in data.items())
        ]
        assert found, f"the base has no {kind} {actor or ''} {step or ''} {generation or ''} {data}"
        return sorted(found, key=lambda row: row.time_ns)

    def drop(self, rows: Iterable[Row]) -> None:
        """Without these."""
        gone = {id(row) for row in rows}
        self.rows = [row for row in self.rows if id(row) not in gone]

    def add(self, row: Row, **changes: Any) -> Row:
        """A copy of a row, with other values; ``data`` is merged into its own."""
        data = {**copy.deepcopy(row.data), **changes.pop("data", {})}
        made = dataclasses.replace(row, data=data, **changes)
        self.rows.append(made)
        return made

    def log(self) -> Log:
        """The log as it would be read."""
        actors: dict[str, list[Row]] = {}
        for row in self.rows:
            actors.setdefault(row.actor, []).append(row)
        if not self.keep_numbers:
            for rows in actors.values():
                rows.sort(key=lambda row: row.time_ns)
            self._claim({name: len(rows) - 1 for name, rows in actors.items()})
            self._number_again(actors)
        return make_log(self._actor_log(name, rows) for name, rows in actors.items())

    def _claim(self, last: Mapping[str, int]) -> None:
        for row in self.rows:
            if row.kind is Kind.PROCESS_EXITED and row.data["last_seq"] is not None:
                row.data["last_seq"] = last.get(row.data["process"], -1)

    def _number_again(self, actors: Mapping[str, list[Row]]) -> None:
        """Whoever is declared silent is so since the same line as before."""
        for row in actors.get(ORCHESTRATOR, ()):
            name, number = row.data.get("process"), row.data.get("last_seq")
            if row.kind is Kind.FAILURE_DETECTED and number is not None:
                was = [kept for kept in self._kept.values() if kept.actor == name]
                places = {id(line): place for place, line in enumerate(actors.get(name, ()))}
                place = places.get(id(was[number])) if 0 <= number < len(was) else None
                row.data["last_seq"] = number if place is None else place

    def _actor_log(self, name: str, rows: list[Row]) -> ActorLog:
        events: list[Event] = []
        problems = []
        for number, row in enumerate(rows):
            events.append(
                Event(
                    kind=row.kind,
                    actor=name,
                    seq=number,
                    time_ns=row.time_ns,
                    generation=row.generation,
                    step=row.step,
                    data=row.data,
                )
            )
        if self.keep_numbers:
            was = [row for row in self._kept.values() if row.actor == name]
            if len(was) != len(rows):
                problems.append(f"{name}.jsonl: {len(rows)} lines where {len(was)} were due")
        ended = bool(events) and events[-1].kind is Kind.ACTOR_ENDED
        return ActorLog(actor=name, events=tuple(events), problems=tuple(problems), ended=ended)


Change = Callable[[Tape], None]


class Mutation:
    """One line of the corpus. ``seen``: checker -> the verdict that it must give (``-`` in a name
    is ``_`` here).
    """

    def __init__(self, name: str, base: str, change: Change, **seen: str) -> None:
        self.name, self.base, self.change = name, base, change
        self.seen = {checker.replace("_", "-"): verdict for checker, verdict in seen.items()}
        assert self.seen and set(self.seen.values()) <= set(_ORDER), f"{name}: name who sees it"

    def __repr__(self) -> str:
        return self.name


# ---- ready changes


def edit(kind: Kind, change: dict[str, Any], **which: Any) -> Change:
    """Other data in all rows found."""

    def do(tape: Tape) -> None:
        for row in tape.find(kind, **which):
            row.data.update(copy.deepcopy(change))

    return do


def drop(kind: Kind, **which: Any) -> Change:
    """Without all rows found."""
    return lambda tape: tape.drop(tape.find(kind, **which))


def move(kind: Kind, ms: float, **which: Any) -> Change:
    """All rows found at another time."""

    def do(tape: Tape) -> None:
        for row in tape.find(kind, **which):
            row.time_ns += round(ms * MS)

    return do


def each(
    kind: Kind, change: Callable[[dict[str, Any]], Any], *, since: int = 0, **which: Any
) -> Change:
    """A function on the data of all rows found, of steps from ``since`` on."""

    def do(tape: Tape) -> None:
        for row in tape.find(kind, **which):
            if (row.step or 0) >= since:
                change(row.data)

    return do


def first(change_all: Callable[[Row], None], kind: Kind, **which: Any) -> Change:
    """A function on the first row found."""
    return lambda tape: change_all(tape.find(kind, **which)[0])


def all_of(*changes: Change) -> Change:
    """Several, one after the other."""

    def do(tape: Tape) -> None:
        for change in changes:
            change(tape)

    return do


def in_control(change: Change) -> Change:
    """In the control arm instead."""

    def do(tape: Tape) -> None:
        assert tape.other is not None
        change(tape.other)

    return do


def in_both(change: Change) -> Change:
    """In both arms."""
    return all_of(change, in_control(change))


def unnumbered(change: Change) -> Change:
    """Without making numbers right again."""

    def do(tape: Tape) -> None:
        tape.keep_numbers = True
        change(tape)

    return do


def the_injection(tape: Tape, fault: str | None = None) -> Row:
    """The first act of a fault."""
    return tape.find(Kind.FAULT_INJECTED, **({"fault": fault} if fault else {}))[0]


def goes_on(process: str) -> Change:
    """A process that a fault hit commits on, in its generation, whenever another one does: it never
    was hit.
    """

    def do(tape: Tape) -> None:
        hit = the_injection(tape)
        like = tape.find(Kind.STEP_COMMITTED, actor=process)[-1]
        later = [row for row in tape.find(Kind.STEP_COMMITTED, rank=0) if row.time_ns > hit.time_ns]
        for row in later:
            tape.add(like, time_ns=row.time_ns, step=row.step)

    return do
