"""Recoveries that are claimed, and not shown."""

from __future__ import annotations

from typing import Any

from tests.mutations.tape import (
    FAIL,
    OPEN,
    Mutation,
    Row,
    Tape,
    drop,
    edit,
    in_control,
)
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind

STARTED, DECIDED, HELD = Kind.GENERATION_STARTED, Kind.DECISION, Kind.STATE_READY
BUILT_IN = ("hot-spare", "checkpoint-restart", "agents")
COMMANDS = ("script", "compare")
_SURE = (
    Kind.FAULT_LANDED,
    Kind.FAULT_HEALED,
    Kind.FAILURE_DETECTED,
    Kind.PROCESS_EXITED,
    Kind.ACTOR_ENDED,
    Kind.LEFTOVERS,
    Kind.RUN_FINISHED,
)


def _declared(tape: Tape) -> None:
    """A rank hangs, it is said, and nothing is done about it."""
    commit = tape.find(Kind.STEP_COMMITTED, step=24)[0]
    data: dict[str, Any] = {
        "failure": 1,
        "cause": "hang",
        "process": "w2",
        "rank": 2,
        "detail": "still",
    }
    row = Row(Kind.FAILURE_DETECTED, ORCHESTRATOR, commit.time_ns, commit.generation, 24, data)
    tape.rows.append(row)


def _unanswered(tape: Tape) -> None:
    """What came of the failure is not in the log: no generation follows."""
    tape.drop(row for row in list(tape.rows) if row.generation >= 2 and row.kind not in _SURE)


def _no_step(tape: Tape) -> None:
    """The generation that answers makes no step, and the job is done."""
    kinds = (Kind.STEP_COMMITTED, Kind.BATCH_TAKEN, Kind.STATE_DIGEST)
    tape.drop(row for kind in kinds for row in tape.find(kind, generation=2))


def _nothing_follows(tape: Tape) -> None:
    """After a command's first failure there is its end."""
    failed = tape.find(Kind.FAILURE_DETECTED)[0]
    new = (Kind.PROCESS_SPAWNED, Kind.COMMAND_STARTED, Kind.STEP_REPORTED, STARTED, DECIDED)
    gone = {row.data["process"] for row in tape.find(new[0], after=failed.time_ns)}
    tape.drop(row for row in list(tape.rows) if row.time_ns > failed.time_ns and row.kind in new)
    tape.drop(row for row in list(tape.rows) if row.data.get("process") in gone)
    drop(Kind.COMMAND_ENDED)(tape)


def _of_a_command(base: str) -> list[Mutation]:
    return [
        Mutation(f"{base}: nothing follows a failure", base, _nothing_follows, recovery_shown=OPEN)
    ]


MUTATIONS = [
    *(
        Mutation(f"{base}: no generation follows a failure", base, _unanswered, recovery_shown=FAIL)
        for base in BUILT_IN
    ),
    *(
        Mutation(f"{base}: no step follows a recovery", base, _no_step, recovery_shown=FAIL)
        for base in ("hot-spare", "agents")
    ),
    Mutation(
        "a failure is not answered, and the job is done",
        "straggler",
        _declared,
        recovery_shown=FAIL,
    ),
    Mutation(
        "the same in the control arm", "hot-spare", in_control(_declared), recovery_shown=FAIL
    ),
    Mutation(
        "a spare kept a state that nobody gave it",
        "hot-spare",
        edit(HELD, {"origin": "kept", "source": None}, generation=2, actor="s4"),
        recovery_shown=FAIL,
    ),
    Mutation(
        "a spare had followed the job, and never began to",
        "hot-spare",
        edit(HELD, {"origin": "live"}, generation=2, actor="s4"),
        recovery_shown=FAIL,
    ),
    Mutation(
        "a spare on another node kept a state that nobody gave it",
        "agents",
        edit(HELD, {"origin": "kept", "source": None}, generation=2, actor="s2"),
        recovery_shown=FAIL,
    ),
    Mutation(
        "all were to restart from a checkpoint, and copied",
        "checkpoint-restart",
        edit(STARTED, {"state": "peer"}, generation=2),
        recovery_shown=FAIL,
    ),
    Mutation(
        "who was lost is in the generation that answers",
        "hang",
        edit(STARTED, {"members": ["w0", "w1", "w2", "w3"]}, generation=2),
        recovery_shown=FAIL,
    ),
    *(mutation for base in COMMANDS for mutation in _of_a_command(base)),
]
