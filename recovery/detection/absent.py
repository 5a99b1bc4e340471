"""Who has not begun a collective that others wait in, by what each rank says of itself. Pure.

Counts of collectives tell it where all ranks enter the same ones (``recovery.detection.hangs``).
Stages of a pipeline do not: there all seem to wait for each other, and each is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainchaos.recovery.transport.wire import CollectiveEntry, Recalled

DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Absence:
    """``process`` has not begun ``awaited``, in which ``waiting`` stand."""

    process: str
    awaited: CollectiveEntry
    waiting: tuple[str, ...]

    @property
    def what(self) -> str:
        """For people: such as ``all_reduce 24 of shard-1``."""
        one = self.awaited
        return f"{one.op or 'collective'} {one.seq} of {one.group.partition('/')[2] or 'all ranks'}"


def absence(said: Mapping[str, Recalled]) -> Absence | None:
    """The one process that others wait for in a collective, and that has itself begun nothing that
    is not done. None: there is no such process, or there are several. ``said``: the answer of each
    process, of one moment.

    Who waits in an operation of its own, with one other rank (which torch does not record for gloo)
    or with several, may only be kept by a third. A rank that never had a part in a group is not
    known to be one of it, and one that does not say what it has begun is not blamed.
    """
    newest = {name: _newest(one) for name, one in said.items()}
    idle = {name for name, one in said.items() if one.begun == 0}
    found: dict[str, Absence] = {}
    for name, entry in _standing(said):
        for other in idle:
            if newest[other].get(entry.group, entry.seq) < entry.seq:
                before = found.get(other)
                waiting = (*(before.waiting if before else ()), name)
                awaited = before.awaited if before else entry
                found[other] = Absence(process=other, awaited=awaited, waiting=waiting)
    return next(iter(found.values())) if len(found) == 1 else None


def _newest(said: Recalled) -> dict[str, int]:
    """Group -> number of the last collective that was begun in it."""
    newest: dict[str, int] = {}
    for entry in said.entries:
        newest[entry.group] = max(entry.seq, newest.get(entry.group, entry.seq))
    return newest


def _standing(said: Mapping[str, Recalled]) -> Iterator[tuple[str, CollectiveEntry]]:
    """Each process with the first collective of each group that it has begun and is not done."""
    for name, one in said.items():
        first: dict[str, CollectiveEntry] = {}
        for entry in one.entries:
            if entry.state != DONE and entry.seq <= first.get(entry.group, entry).seq:
                first[entry.group] = entry
        for entry in first.values():
            yield name, entry
