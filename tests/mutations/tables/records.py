"""What was trained, by whom, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.mutations.tape import (
    FAIL,
    MS,
    OPEN,
    Change,
    Mutation,
    Row,
    Tape,
    all_of,
    drop,
    each,
    edit,
    in_control,
    the_injection,
    unnumbered,
)
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind

COMMIT = Kind.STEP_COMMITTED


def _others_samples(tape: Tape) -> None:
    """Step 30 trains on the samples of step 31."""
    for row in tape.find(Kind.BATCH_TAKEN, step=30):
        (like,) = tape.find(Kind.BATCH_TAKEN, step=31, rank=row.data["rank"])
        row.data["samples"] = list(like.data["samples"])


def _zombie(tape: Tape) -> None:
    last = tape.find(Kind.GENERATION_READY)[-1].time_ns
    row = tape.find(COMMIT, step=15, generation=1, actor="w0")[0]
    tape.add(row, time_ns=last + MS)


def _begins_again(tape: Tape) -> None:
    row = tape.find(Kind.GENERATION_STARTED)[-1]
    tape.add(row, time_ns=row.time_ns + 1)


def _commits_after_parking(tape: Tape) -> None:
    parked = tape.find(Kind.PARKED, actor="w0")[0]
    row = tape.find(COMMIT, actor="w0", generation=1)[-1]
    row.time_ns = parked.time_ns + 1


def _restores_less(tape: Tape) -> None:
    """It goes on from the checkpoint before the newest one."""
    ready = tape.find(Kind.GENERATION_READY)[-1]
    newest, older = ready.data["resume_step"], ready.data["resume_step"] - 8
    names = {
        row.step: row.data["checkpoint"]
        for row in tape.find(Kind.CHECKPOINT_COMMITTED, generation=1)
    }
    ready.data |= {"resume_step": older, "checkpoint": names[older]}
    for row in tape.find(Kind.STATE_READY, generation=ready.generation):
        row.step = older
        row.data["source"] = (
            names[older] if row.data["origin"] == "checkpoint" else row.data["source"]
        )
    for step in range(older + 1, newest + 1):
        for row in [
            *tape.find(COMMIT, step=step, generation=1),
            *tape.find(Kind.BATCH_TAKEN, step=step, generation=1),
        ]:
            rank = row.data["rank"]
            actor = tape.find(Kind.STATE_READY, generation=ready.generation, rank=rank)[0].actor
            done = row.kind is COMMIT
            at = ready.time_ns + (step - newest - 1) * 1000 + done
            data = {"seconds": {"forward": 1e-7}} if done else {}
            tape.add(row, actor=actor, generation=ready.generation, time_ns=at, data=data)
    first = tape.find(Kind.STATE_READY, generation=ready.generation, rank=0)[0].actor
    for kind, after in ((Kind.CHECKPOINT_SAVING, 2), (Kind.CHECKPOINT_COMMITTED, 3)):
        row = tape.find(kind, step=newest, generation=1)[0]
        tape.add(
            row, actor=first, generation=ready.generation, time_ns=ready.time_ns - 1000 + after
        )


def _declare(tape: Tape, step: int, process: str, cause: str, rank: int) -> None:
    """A failure that was none."""
    commit = tape.find(COMMIT, step=step)[0]
    data = {"failure": 1, "cause": cause, "process": process, "rank": rank, "detail": "still"}
    tape.rows.append(
        Row(Kind.FAILURE_DETECTED, ORCHESTRATOR, commit.time_ns, commit.generation, step, data)
    )


def _blames(tape: Tape) -> None:
    _declare(tape, 24, "w2", "notice", 2)


def _false_alarm(tape: Tape) -> None:
    _declare(tape, 20, "w1", "hang", 1)


def _deleted_at_once(tape: Tape) -> None:
    for row in tape.find(Kind.CHECKPOINT_COMMITTED, generation=1):
        name = row.data["checkpoint"]
        tape.add(row, kind=Kind.CHECKPOINT_DELETED, time_ns=row.time_ns + 1).data = {
            "checkpoint": name
        }


def _deleted_early(tape: Tape) -> None:
    """When three are there, and three are to be kept."""
    newest = tape.find(Kind.CHECKPOINT_COMMITTED, step=24)[0]
    gone = tape.find(Kind.CHECKPOINT_DELETED, step=8)
    assert gone, "which the base deletes later"
    tape.drop(gone)
    tape.add(gone[0], actor=newest.actor, generation=newest.generation, time_ns=newest.time_ns + 1)


def _crawls(tape: Tape) -> None:
    ready = tape.find(Kind.GENERATION_READY)[-1].time_ns
    for row in tape.rows:
        if row.time_ns > ready:
            row.time_ns = ready + 4 * (row.time_ns - ready)


def _runs_back(tape: Tape) -> None:
    """Two lines of a rank are written with each other's times."""
    tape.keep_numbers = True
    a, b = tape.find(Kind.BATCH_TAKEN, actor="w0")[3:5]
    a.time_ns, b.time_ns = b.time_ns, a.time_ns


def _no_log_of_the_last(tape: Tape) -> None:
    """Of the process that was started last, and was never needed."""
    name = tape.find(Kind.PROCESS_READY)[-1].data["process"]
    tape.rows = [row for row in tape.rows if row.actor != name]


def _heard_late(tape: Tape) -> None:
    """That the first generation was ready is written down when the fault is there already."""
    tape.find(Kind.GENERATION_READY, generation=1)[0].time_ns = the_injection(tape).time_ns + 1


def _last(kind: Kind, **data: object) -> Change:
    """The last one alone has other data."""
    return lambda tape: tape.find(kind)[-1].data.update(data)


def _add(name: str, by: float) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update({name: data[name] + by})


def _put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(values)


MUTATIONS = [
    Mutation(
        "a step that is done again later was left out",
        "checkpoint-restart",
        all_of(drop(COMMIT, generation=1, step=18), drop(Kind.BATCH_TAKEN, generation=1, step=18)),
        step_arithmetic=FAIL,
    ),
    Mutation(
        "a save that is due is never begun",
        "drop-replica",
        all_of(drop(Kind.CHECKPOINT_SAVING, step=8), drop(Kind.CHECKPOINT_COMMITTED, step=8)),
        checkpoint_integrity=FAIL,
    ),
    Mutation(
        "a save in memory that is due is never begun",
        "memory",
        all_of(
            drop(Kind.CHECKPOINT_SAVING, step=5, place="memory"),
            drop(Kind.CHECKPOINT_COMMITTED, step=5, place="memory"),
        ),
        checkpoint_integrity=FAIL,
    ),
    Mutation(
        "a step trains on the samples of another",
        "drop-replica",
        _others_samples,
        sample_accounting=FAIL,
    ),
    Mutation(
        "a rank's batch is not in the log",
        "hot-spare",
        drop(Kind.BATCH_TAKEN, step=30, actor="w0"),
        sample_accounting=FAIL,
    ),
    Mutation("a zombie commits", "drop-replica", _zombie, single_writer=FAIL),
    Mutation(
        "a generation begins under the number of one before",
        "drop-replica",
        _begins_again,
        single_writer=FAIL,
    ),
    Mutation(
        "a rank commits after it has parked",
        "drop-replica",
        _commits_after_parking,
        single_writer=FAIL,
    ),
    Mutation(
        "an older checkpoint is restored", "checkpoint-restart", _restores_less, no_lost_commit=FAIL
    ),
    Mutation(
        "each checkpoint is deleted at once",
        "drop-replica",
        _deleted_at_once,
        checkpoint_integrity=FAIL,
    ),
    Mutation(
        "a checkpoint is deleted too early",
        "drop-replica",
        _deleted_early,
        checkpoint_integrity=FAIL,
    ),
    Mutation(
        "a checkpoint out of nowhere is restored",
        "checkpoint-restart",
        edit(Kind.GENERATION_READY, {"checkpoint": "step-9"}, generation=2),
        checkpoint_integrity=FAIL,
    ),
    Mutation(
        "one rank's parameters drift",
        "drop-replica",
        _last(Kind.STATE_DIGEST, parameters="00"),
        replica_equality=FAIL,
    ),
    Mutation(
        "ranks disagree on the loss", "drop-replica", _last(COMMIT, loss=9.0), replica_equality=FAIL
    ),
    Mutation(
        "another generator",
        "drop-replica",
        _last(Kind.STATE_DIGEST, rng="00"),
        replica_equality=FAIL,
    ),
    Mutation(
        "all losses are a little off",
        "hot-spare",
        each(COMMIT, _add("loss", 1e-9), since=25),
        loss_equality=FAIL,
    ),
    Mutation(
        "all hold other parameters at the end",
        "checkpoint-restart",
        edit(Kind.STATE_DIGEST, {"parameters": "00"}, step=40),
        loss_equality=FAIL,
    ),
    Mutation(
        "a gradient norm that is no number",
        "hot-spare",
        each(COMMIT, _put(grad_norm=float("nan")), since=39),
        nan_containment=FAIL,
    ),
    Mutation(
        "the failure is blamed on another",
        "hot-spare",
        edit(Kind.FAILURE_DETECTED, {"process": "w1", "rank": 1}),
        detection=FAIL,
    ),
    Mutation(
        "a false alarm in the control arm", "hot-spare", in_control(_false_alarm), detection=FAIL
    ),
    Mutation("the job crawls after the recovery", "drop-replica", _crawls, liveness=FAIL),
    Mutation(
        "a spare was promised and not started",
        "hot-spare",
        edit(Kind.RUN_STARTED, {"spares": 2}),
        membership=FAIL,
    ),
    Mutation(
        "a rank counts a smaller world",
        "drop-replica",
        edit(COMMIT, {"world": 3}, step=10, actor="w0"),
        membership=FAIL,
    ),
    Mutation(
        "the scheduler is stepped twice",
        "hot-spare",
        each(COMMIT, _add("scheduler_step", 1), since=22),
        step_arithmetic=FAIL,
    ),
    Mutation(
        "the learning rate is another",
        "drop-replica",
        each(COMMIT, _put(lr=9.0), since=25),
        step_arithmetic=FAIL,
    ),
    Mutation("a clock runs backwards", "drop-replica", _runs_back, evidence_complete=OPEN),
    Mutation(
        "shared memory is left",
        "hot-spare",
        edit(Kind.LEFTOVERS, {"shared_memory": ["marks"]}),
        no_orphans=FAIL,
    ),
    Mutation(
        "a process is never seen to exit",
        "hot-spare",
        drop(Kind.PROCESS_EXITED, process="w0"),
        no_orphans=FAIL,
    ),
    Mutation("nobody looked for leftovers", "hot-spare", drop(Kind.LEFTOVERS), no_orphans=OPEN),
    Mutation(
        "the log of a spare is gone", "hot-spare", _no_log_of_the_last, evidence_complete=OPEN
    ),
    Mutation(
        "a line is missing",
        "hot-spare",
        unnumbered(drop(Kind.PROCESS_READY, process="w0")),
        evidence_complete=OPEN,
    ),
    Mutation(
        "the fault has no evidence",
        "hot-spare",
        drop(Kind.FAULT_LANDED),
        fault_landed=OPEN,
        landing=FAIL,
    ),
    Mutation(
        "only the injector says that it landed",
        "straggler",
        edit(Kind.FAULT_LANDED, {"witness": "injector"}),
        fault_landed=OPEN,
    ),
    Mutation("somebody was blamed for what hurts nobody", "straggler", _blames, expectation=FAIL),
    Mutation(
        "the fault came before the steady state",
        "steady",
        _heard_late,
        steady_state=OPEN,
    ),
]
