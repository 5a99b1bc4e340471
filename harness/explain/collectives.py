"""In which collectives ranks stood when they were suspected to hang, by the flight records that a
log holds of them: who waits in which, and who has not begun it.

All is taken from ``collectives_dumped`` (``recovery.detection.flight_recorder`` says what torch
writes, ``recovery.detection.ras`` what NCCL's RAS says); the numbers of collectives are alike on
all ranks of a group, as every rank has to call the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log

MOST_ENTRIES = 64  # read of one record
MOST_SAID = 6  # lines about one hang
MOST_TEXT = 80
MOST_WHY = 400  # of RAS
SAME_SIZES = frozenset({"all_reduce", "broadcast"})
"""Collectives whose tensors have the same size on every rank. Of others, such as ``gather`` or
``all_to_all``, sizes may differ by right.
"""
DONE = "done"
RAS = "ras"
"""The role of what NCCL's RAS says of a process, in words."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A collective of a rank: its group, its number there, and whether it is done."""

    group: str
    seq: int
    op: str
    sizes: str
    done: bool

    @property
    def name(self) -> str:
        """As ``all_reduce 41``."""
        return f"{self.op or 'collective'} {self.seq}"

    @property
    def sized(self) -> str:
        """As ``all_reduce 41 (8 Float)``."""
        return f"{self.name} ({self.sizes})" if self.sizes else self.name

    def matches(self, other: Entry) -> bool:
        """Whether two ranks in them are in the same collective."""
        return self.op == other.op and (self.op not in SAME_SIZES or self.sizes == other.sizes)


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """Of one rank. ``role``: hung, peer, stuck or ras (``chaos.events.kinds``); ``rank``: None if
    it did not say; ``why``: there are no entries; of ras, what it says.
    """

    process: str
    role: str
    rank: int | None
    entries: tuple[Entry, ...]
    why: str

    @property
    def who(self) -> str:
        """For people."""
        return f"rank {self.rank} ({self.process})" if self.rank is not None else self.process


def records_between(log: Log, start_ns: float, end_ns: float) -> tuple[FlightRecord, ...]:
    """Those of a time, in the order of the log; entries of another form are left out."""
    return tuple(
        FlightRecord(
            process=str(event.data["process"])[:MOST_TEXT],
            role=str(event.data["role"])[:MOST_TEXT],
            rank=rank if type(rank := event.data["rank"]) is int else None,
            entries=tuple(_entries(event.data["entries"])),
            why=str(event.data["why"])[: MOST_WHY if event.data["role"] == RAS else MOST_TEXT],
        )
        for event in log.of(Kind.COLLECTIVES_DUMPED)
        if start_ns <= event.time_ns <= end_ns
    )


def _entries(found: object) -> Iterator[Entry]:
    for one in found[:MOST_ENTRIES] if isinstance(found, list | tuple) else ():
        if not isinstance(one, Mapping) or type(number := one.get("seq")) is not int:
            continue
        texts = [str(one.get(name, ""))[:MOST_TEXT] for name in ("group", "op", "sizes", "state")]
        group, op, sizes, state = texts
        yield Entry(group=group, seq=number, op=op, sizes=sizes, done=state == DONE)


def standing(records: Sequence[FlightRecord]) -> list[str]:
    """What the records of the ranks that were asked for one hang say together, for people; at most
    MOST_SAID lines, the most telling first. Pure.
    """
    seen = [(_RAS, f"{r.process}, by NCCL's RAS: {r.why}") for r in records if r.role == RAS]
    told = {r.process: r for r in records if r.role != RAS}  # the last of each
    groups = dict.fromkeys(entry.group for record in told.values() for entry in record.entries)
    found = [line for group in groups for line in _of_group(group, [*told.values()])]
    found.sort(key=lambda line: line[0])
    if not found and any(record.entries for record in told.values()):
        found = [(_QUIET, "no collective was under way in any rank that was asked")]
    silent = [(_SILENT, f"{r.who} gave no record: {r.why}") for r in told.values() if not r.entries]
    return [text for _, text in (found + seen + silent)[:MOST_SAID]]


_MISMATCH, _BEHIND, _THROUGH, _ALIKE, _QUIET, _RAS, _SILENT = range(7)


def _of_group(group: str, records: Sequence[FlightRecord]) -> Iterator[tuple[int, str]]:
    """About the first collective of a group that some rank has begun and not finished."""
    of = {r: [e for e in r.entries if e.group == group] for r in records}
    of = {record: entries for record, entries in of.items() if entries}
    unfinished = [entry.seq for entries in of.values() for entry in entries if not entry.done]
    if not unfinished:
        return
    number = min(unfinished)
    at = {r: e for r, entries in of.items() for e in entries if e.seq == number}
    waiting = {record: entry for record, entry in at.items() if not entry.done}
    first = next(iter(waiting.values()))
    if not all(first.matches(entry) for entry in at.values()):
        each = "; ".join(f"{r.who} is in {entry.sized}" for r, entry in at.items())
        yield _MISMATCH, f"{each}: they do not match, in {group}"
        return
    waits = f"{_names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in"
    last = {record: max(entries, key=lambda e: e.seq) for record, entries in of.items()}
    behind = [record for record, entry in last.items() if entry.seq < number]
    through = [record for record in last if record not in waiting and record not in behind]
    for record in behind:
        text = f"{record.who} has not begun {first.sized} of {group}; its last there is"
        yield _BEHIND, f"{text} {last[record].name}, done; {waits} {first.name}"
    if through:
        done = f"{_names(through)} {'is' if len(through) == 1 else 'are'} through it"
        yield _THROUGH, f"{waits} {first.sized} of {group}; {done}"
    elif not behind:
        others = "none of them is behind" if len(waiting) > 1 else "no other has a record of it"
        yield _ALIKE, f"{waits} {first.sized} of {group}; {others}"


def _names(records: Iterable[FlightRecord]) -> str:
    return ", ".join(record.who for record in records)
