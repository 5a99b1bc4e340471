"""Spares that are said to follow what they cannot, or what others follow already."""

from __future__ import annotations

from typing import Any

from tests.mutations.tape import FAIL, Change, Mutation, Row, Tape, edit, the_injection
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind

PLACED = Kind.SPARE_PLACED


def _last(**changes: Any) -> Change:
    """The last spare of the job, which never gets a rank, was told otherwise."""
    return lambda tape: tape.find(PLACED)[-1].data.update(changes)


def _crossed(tape: Tape) -> None:
    """The first two spares were told each other's part."""
    for row in tape.find(PLACED)[:2]:
        row.data["shard"] = 1 - row.data["shard"]


def _told_again(shard: int) -> Change:
    """The last spare is told once more; it followed part 1."""

    def do(tape: Tape) -> None:
        row = tape.find(PLACED)[-1]
        assert row.data["shard"] == 1
        tape.add(row, time_ns=row.time_ns + 1, data={"shard": shard})

    return do


def _too_early(tape: Tape) -> None:
    """The last spare was told before it was started."""
    row = tape.find(PLACED)[-1]
    started = tape.find(Kind.PROCESS_SPAWNED, process=row.data["process"])[0]
    row.time_ns, row.generation = started.time_ns - 1, started.generation


def _without_parts(tape: Tape) -> None:
    """A spare of a job whose spares follow nothing is told what to follow."""
    hit = the_injection(tape)
    data = {"process": "s4", "shard": 0}
    tape.rows.append(Row(PLACED, ORCHESTRATOR, hit.time_ns - 1, hit.generation, None, data))


MUTATIONS = [
    Mutation("a spare follows a part that is none", "live parts", _last(shard=7), membership=FAIL),
    Mutation("a spare follows a part before all", "live parts", _last(shard=-1), membership=FAIL),
    Mutation(
        "a spare follows what another does, and nobody the rest",
        "live parts",
        _last(shard=0),
        membership=FAIL,
    ),
    Mutation(
        "all spares follow one part", "live parts", edit(PLACED, {"shard": 0}), membership=FAIL
    ),
    Mutation(
        "nobody that was started follows", "live parts", _last(process="s99"), membership=FAIL
    ),
    Mutation("a spare follows before it is started", "live parts", _too_early, membership=FAIL),
    Mutation("a member follows as a spare", "live parts", _last(process="w3"), membership=FAIL),
    Mutation("who was a member follows", "live parts", _last(process="w1"), membership=FAIL),
    Mutation("a spare takes the place of another part", "live parts", _crossed, membership=FAIL),
    Mutation("a spare is told another part", "live parts", _told_again(0), membership=FAIL),
    Mutation(
        "a spare of a job without parts follows", "hot-spare", _without_parts, membership=FAIL
    ),
]
