"""Ends that cannot be, and jobs that learned nothing."""

from __future__ import annotations

from typing import Any

from tests.mutations.tape import (
    FAIL,
    MS,
    OPEN,
    Change,
    Mutation,
    Tape,
    each,
    edit,
    in_both,
    in_control,
)
from trainchaos.chaos.events.log import Kind


def raised(actor: str) -> Change:
    """A process says that it fails, and goes on as if it had not."""

    def do(tape: Tape) -> None:
        model = tape.find(Kind.STEP_COMMITTED, actor=actor, step=12)[0]
        error = {"type": "RuntimeError", "message": "a tensor of the wrong shape"}
        row = tape.add(model, kind=Kind.ERROR_RAISED, step=None, time_ns=model.time_ns + 1)
        row.data = error

    return do


def _last_words(tape: Tape) -> None:
    """A survivor's end mark is an error, while its exit is that of a process that ended well."""
    row = tape.find(Kind.ACTOR_ENDED, actor="w1")[0]
    row.kind, row.data = Kind.ERROR_RAISED, {"type": "RuntimeError", "message": "at the very end"}


def _exit(process: str, **values: Any) -> Change:
    return edit(Kind.PROCESS_EXITED, values, process=process)


def _frozen(part: str) -> Change:
    """Parameters, or what the optimizer keeps, never move."""
    return each(Kind.STATE_DIGEST, lambda data: data.update({part: "00" * 8}))


def _unasked(tape: Tape) -> None:
    """A rank ends by itself, unnoticed by all."""
    last = max(row.time_ns for row in tape.find(Kind.STEP_COMMITTED))
    row = tape.find(Kind.PROCESS_EXITED, process="w1")[0]
    row.time_ns = max(row.time_ns, last + MS)
    row.data.update(expected=False, asked_ns=None, exit_code=3)


def _nobody_started(tape: Tape) -> None:
    """Nobody was decided on in place of the lost, and nobody came."""
    decided = [
        r
        for r in tape.find(Kind.DECISION)
        if any(str(a).startswith("spawn") for a in r.data["actions"])
    ]
    came = tape.find(Kind.PROCESS_SPAWNED, after=decided[0].time_ns - 1)
    names = {row.data["process"] for row in came}
    theirs = [r for r in tape.rows if r.actor in names or r.data.get("process") in names]
    tape.drop([*decided, *theirs])


def _was_ready(tape: Tape) -> None:
    """Whoever was started in place of the lost was ready two steps later."""
    decided = next(
        r for r in tape.find(Kind.DECISION) if str(r.data["actions"][0]).startswith("spawn")
    )
    came = tape.find(Kind.PROCESS_SPAWNED, after=decided.time_ns - 1)[0]
    like = tape.find(Kind.PROCESS_READY)[0]
    tape.add(
        like,
        time_ns=came.time_ns + 700 * MS,
        generation=came.generation,
        data={"process": came.data["process"]},
    )


def _one_less(tape: Tape) -> None:
    row = tape.find(Kind.GENERATION_STARTED)[-1]
    row.data["members"] = row.data["members"][:-1]


MUTATIONS = [
    Mutation("a survivor raises an error and goes on", "drop-replica", raised("w1"), ending=FAIL),
    Mutation("an error in the control arm", "drop-replica", in_control(raised("w0")), ending=FAIL),
    Mutation("a survivor's last words are an error", "hot-spare", _last_words, ending=OPEN),
    Mutation("a rank ends badly when asked to", "hot-spare", _exit("w1", exit_code=1), ending=FAIL),
    Mutation(
        "a rank dies when asked to end",
        "hot-spare",
        _exit("w1", exit_code=None, signal=11),
        ending=FAIL,
    ),
    Mutation("a rank ends by itself", "hot-spare", _unasked, ending=FAIL),
    Mutation(
        "parameters do not move", "hot-spare", in_both(_frozen("parameters")), replica_equality=FAIL
    ),
    Mutation(
        "an optimizer keeps nothing new",
        "hot-spare",
        in_both(_frozen("optimizer")),
        replica_equality=FAIL,
    ),
    Mutation("nobody is started in place of a spare", "spare used", _nobody_started, ending=FAIL),
    Mutation("nobody is started in place of the lost", "ends small", _nobody_started, ending=FAIL),
    Mutation(
        "nobody is started in place of one of a replica",
        "ends a replica short",
        _nobody_started,
        ending=FAIL,
    ),
    Mutation("a replacement that is ready waits to the end", "ends small", _was_ready, ending=FAIL),
    Mutation(
        "a replica that could be filled waits to the end",
        "ends a replica short",
        _was_ready,
        ending=FAIL,
    ),
    Mutation("the last generation lacks a rank", "few checks", _one_less, full_strength=FAIL),
    Mutation(
        "the job gave up, few checks",
        "few checks",
        edit(Kind.RUN_FINISHED, {"outcome": "gave-up"}),
        finished=FAIL,
    ),
]
