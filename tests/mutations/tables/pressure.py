"""What arms record of their machine's processors, where a job crawls."""

from __future__ import annotations

from typing import Any

from tests.mutations.tape import (
    FAIL,
    OPEN,
    Change,
    Mutation,
    Row,
    Tape,
    all_of,
    drop,
    each,
    in_control,
)
from tests.support.fakes.readings import Load, readings, steady
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind

BUSY = steady(0.3, 0.5)


def read(load: Load) -> Change:
    """The arm recorded this load, generation by generation."""

    def do(tape: Tape) -> None:
        ready = tape.find(Kind.GENERATION_READY)
        ends = [row.time_ns for row in ready[1:]] + [max(row.time_ns for row in tape.rows)]
        for begun, end in zip(ready, ends, strict=True):
            for time_ns, data in readings(begun.time_ns, end - 1, begun.data["members"], load):
                tape.rows.append(
                    Row(Kind.PRESSURE_READ, ORCHESTRATOR, time_ns, begun.generation, None, data)
                )

    return do


def crawls(tape: Tape) -> None:
    """Steps take four times as long after the recovery."""
    ready = tape.find(Kind.GENERATION_READY)[-1].time_ns
    for row in tape.rows:
        if row.time_ns > ready:
            row.time_ns = ready + 4 * (row.time_ns - ready)


def _slower(change: Change, load: Load = BUSY) -> Change:
    return all_of(crawls, in_control(read(BUSY)), read(load), change)


def _says(**data: Any) -> Change:
    return each(Kind.PRESSURE_READ, lambda row: row.update(data))


def _mutation(name: str, change: Change, verdict: str = FAIL, load: Load = BUSY) -> Mutation:
    return Mutation(
        f"it crawls, and {name}", "drop-replica", _slower(change, load), liveness=verdict
    )


MADE_UP = steady(0.1, 0.8)
MUTATIONS = [
    _mutation("its machine was as busy for both arms", _says()),
    _mutation("the readings are removed", drop(Kind.PRESSURE_READ), load=MADE_UP),
    _mutation("a machine that became too busy is made up without a flaw", _says(), OPEN, MADE_UP),
]
