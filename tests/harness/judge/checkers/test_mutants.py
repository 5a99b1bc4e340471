"""Clean logs spoilt as a buggy implementation would: each bug turns its own checker red, and no
other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support import logs
from tests.support.arms import CLEAN, FAIL, OPEN, evidence_of, red
from tests.support.logs import MS, Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import CHECKERS

Mutant = Callable[[Script], None]


def _samples(step: int, of: int) -> Mutant:
    def change(script: Script) -> None:
        for line in script.find(Kind.BATCH_TAKEN, step=step):
            rank, world = (
                line.data["rank"],
                len({x.actor for x in script.find(Kind.BATCH_TAKEN, step=step)}),
            )
            part = logs.share(rank, world, logs.BATCH)
            line.data["samples"] = logs.batch(of, logs.BATCH, logs.SAMPLES, script.seed)[
                part.start : part.stop
            ]

    return change


def _swap(a: int, b: int) -> Mutant:
    def change(script: Script) -> None:
        _samples(a, b)(script)
        _samples(b, a)(script)

    return change


def _edit(kind: Kind, change: dict[str, Any], **which: Any) -> Mutant:
    return lambda script: script.edit(kind, change, **which)


def _drop(kind: Kind, **which: Any) -> Mutant:
    return lambda script: script.drop(kind, **which)


def _both(one: Mutant, other: Mutant) -> Mutant:
    def change(script: Script) -> None:
        one(script)
        other(script)

    return change


def _late(kind: Kind, like: int) -> Mutant:
    """w0 (or the killed w2) repeats something for generation 1 half a step after the last
    generation was ready.
    """

    def change(script: Script) -> None:
        source = script.find(kind, step=like, generation=1)[0]
        after = script.find(Kind.GENERATION_READY)[-1].time_ns + MS
        script.lines.append(replace(source, time_ns=after, data=dict(source.data)))

    return change


def _from(
    step: int, change: Callable[[dict[str, Any]], None], kind: Kind = Kind.STEP_COMMITTED
) -> Mutant:
    """Change every line of a kind from a step on, in the last generation."""

    def mutate(script: Script) -> None:
        for line in script.find(kind):
            if (line.step or 0) >= step and line.generation > 1:
                change(line.data)

    return mutate


def _edit_exit(process: str, **values: Any) -> Mutant:
    """Another account of a process's end."""

    def change(script: Script) -> None:
        for line in script.find(Kind.PROCESS_EXITED):
            if line.data["process"] == process:
                line.data.update(values)

    return change


def _never_ready(script: Script) -> None:
    line = next(each for each in script.find(Kind.PROCESS_READY) if each.data["process"] == "w1")
    script.lines.remove(line)


def _early(actor: str, by_ms: int) -> Mutant:
    """All that an actor says before its last words, by another clock."""

    def change(script: Script) -> None:
        for line in script.lines:
            if line.actor == actor:
                line.time_ns -= by_ms * MS

    return change


def _add(name: str, by: float) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update({name: data[name] + by})


def _put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(values)


def _delete_all_but_newest(script: Script) -> None:
    line = script.find(Kind.CHECKPOINT_COMMITTED, step=20, generation=1)[0]
    for step in (10, 20):
        gone = replace(
            line,
            kind=Kind.CHECKPOINT_DELETED,
            time_ns=line.time_ns + 1,
            data={"checkpoint": f"step-{step}"},
        )
        script.lines.append(gone)


def _delete_the_agreed_one(script: Script) -> None:
    """Replicas compare seldom, and retention only looks at the newest."""
    line = script.find(Kind.CHECKPOINT_COMMITTED, step=20, generation=1)[0]
    agreed = replace(
        line,
        actor="orchestrator",
        kind=Kind.REPLICAS_AGREED,
        step=10,
        time_ns=line.time_ns - 1,
        data={"saved": 10},
    )
    gone = replace(
        line,
        kind=Kind.CHECKPOINT_DELETED,
        step=10,
        time_ns=line.time_ns + 1,
        data={"checkpoint": "step-10"},
    )
    script.lines += [agreed, gone]


def _set_aside(script: Script) -> None:
    """What was restored had been said to be doubtful."""
    line = script.find(Kind.CHECKPOINT_COMMITTED, step=20, generation=1)[0]
    data = {"checkpoint": "step-20", "reason": "doubtful"}
    script.lines.append(
        replace(line, kind=Kind.CHECKPOINT_SET_ASIDE, time_ns=line.time_ns + 1, data=data)
    )


def _slow_after_recovery(script: Script) -> None:
    ready = script.find(Kind.GENERATION_READY)[-1].time_ns
    for line in script.lines:
        if line.time_ns > ready:
            line.time_ns = ready + 3 * (line.time_ns - ready)
    script.now = ready + 3 * (script.now - ready)


def _one_rank(kind: Kind, step: int, **values: Any) -> Mutant:
    def change(script: Script) -> None:
        script.find(kind, step=step)[-1].data.update(values)

    return change


MUTANTS: dict[str, tuple[str, Mutant, dict[str, str]]] = {
    "a batch is skipped": ("hot-spare", _samples(30, 41), {"sample-accounting": FAIL}),
    "a batch is replayed": ("hot-spare", _samples(30, 29), {"sample-accounting": FAIL}),
    "two batches change places": ("checkpoint-restart", _swap(30, 31), {"sample-accounting": FAIL}),
    "a zombie commits": (
        "hot-spare",
        _late(Kind.STEP_COMMITTED, 26),
        {"single-writer": FAIL, "lifecycle": FAIL},
    ),
    "a zombie writes a checkpoint": (
        "drop-replica",
        _late(Kind.CHECKPOINT_COMMITTED, 20),
        {"single-writer": FAIL, "lifecycle": FAIL},
    ),
    "random state is forgotten": (
        "hot-spare",
        _from(27, _add("loss", 1e-9)),
        {"loss-equality": FAIL},
    ),
    "a generator is not restored": (
        "drop-replica",
        _one_rank(Kind.STATE_DIGEST, 40, rng="other"),
        {"replica-equality": FAIL},
    ),
    "a shard is dropped": (
        "checkpoint-restart",
        _from(40, _put(parameters="other"), Kind.STATE_DIGEST),
        {"loss-equality": FAIL},
    ),
    "replicas drift apart": (
        "drop-replica",
        _one_rank(Kind.STATE_DIGEST, 40, parameters="other"),
        {"replica-equality": FAIL},
    ),
    "ranks disagree on the loss": (
        "drop-replica",
        _one_rank(Kind.STEP_COMMITTED, 35, loss=9.0),
        {"replica-equality": FAIL},
    ),
    "the learning rate's effect is too large": (
        "drop-replica",
        _from(28, _add("loss", 0.5)),
        {"loss-equality": FAIL},
    ),
    "the loss is a little too good at the end": (
        "drop-replica",
        _from(28, _add("loss", -0.2)),
        {"loss-equality": FAIL},
    ),
    "the loss is too good": (
        "drop-replica",
        _from(28, _add("loss", -0.5)),
        {"loss-equality": FAIL},
    ),
    "the learning rate is scaled": (
        "drop-replica",
        _from(28, _put(lr=4e-3)),
        {"step-arithmetic": FAIL},
    ),
    "the optimizer's step is forgotten": (
        "checkpoint-restart",
        _from(21, _add("optimizer_step", -20)),
        {"step-arithmetic": FAIL},
    ),
    "the scheduler is stepped twice": (
        "hot-spare",
        _from(27, _add("scheduler_step", 1)),
        {"step-arithmetic": FAIL},
    ),
    "a rank's share is not reduced": (
        "drop-replica",
        _from(30, _add("samples", -4)),
        {"step-arithmetic": FAIL},
    ),
    "the end claims a step too many": (
        "hot-spare",
        _edit(Kind.RUN_FINISHED, {"committed_step": 41}),
        {"step-arithmetic": FAIL},
    ),
    "the last good checkpoints are deleted": (
        "hot-spare",
        _delete_all_but_newest,
        {"checkpoint-integrity": FAIL},
    ),
    "the newest checkpoint that was agreed on is deleted": (
        "hot-spare",
        _delete_the_agreed_one,
        {"checkpoint-integrity": FAIL},
    ),
    "a doubtful checkpoint is restored": (
        "checkpoint-restart",
        _set_aside,
        {"checkpoint-integrity": FAIL},
    ),
    "a checkpoint out of nowhere is restored": (
        "checkpoint-restart",
        _edit(Kind.GENERATION_READY, {"checkpoint": "step-20b"}, generation=2),
        {"checkpoint-integrity": FAIL},
    ),
    "an infinite gradient is committed": (
        "hot-spare",
        _from(39, _put(grad_norm=float("inf"))),
        {"nan-containment": FAIL},
    ),
    "a planted NaN goes unseen": (
        "nan",
        _drop(Kind.NONFINITE_CAUGHT),
        {"nan-containment": FAIL, "lifecycle": FAIL},
    ),
    "the wrong rank is blamed": (
        "hot-spare",
        _edit(Kind.FAILURE_DETECTED, {"process": "w1", "rank": 1}),
        # w1, whose end is declared, goes on, and ends when it is asked to; that of w2 is declared
        # by nobody
        {
            "detection": FAIL,
            "happens-before": FAIL,
            "ending": FAIL,
            "lifecycle": FAIL,
            "recovery-shown": FAIL,
        },
    ),
    "the right process with the wrong rank": (
        "hot-spare",
        _edit(Kind.FAILURE_DETECTED, {"rank": 0}),
        {"detection": FAIL, "lifecycle": FAIL},
    ),
    "nobody says that it landed": (
        "hot-spare",
        _drop(Kind.FAULT_LANDED),
        {"fault-landed": OPEN, "landing": FAIL},
    ),
    "only the injector says it landed": (
        "straggler",
        _edit(Kind.FAULT_LANDED, {"witness": "injector"}),
        {"fault-landed": OPEN, "landing": FAIL},
    ),
    "who is killed was reaped with another signal": (
        "hot-spare",
        _edit(Kind.FAULT_LANDED, {"evidence": {"signal": 11}}),
        {"landing": FAIL},
    ),
    "the job crawls after recovery": ("hot-spare", _slow_after_recovery, {"liveness": FAIL}),
    "a promised spare was not started": (
        "hot-spare",
        _edit(Kind.RUN_STARTED, {"spares": 2}),
        {"membership": FAIL},
    ),
    "a rank takes another's place": (
        "hot-spare",
        _edit(Kind.GROUP_FORMED, {"rank": 3}, actor="s0"),
        {"membership": FAIL},
    ),
    "a rank counts a smaller world": (
        "hot-spare",
        _one_rank(Kind.STEP_COMMITTED, 35, world=3),
        {"membership": FAIL},
    ),
    "a rank accounts for too much time": (
        "hot-spare",
        _from(27, _put(seconds={"forward": 0.06})),
        {"time-closure": FAIL},
    ),
    "a process is left": (
        "hot-spare",
        _edit(Kind.LEFTOVERS, {"processes": [{"pid": 7, "process": "w1"}]}),
        {"no-orphans": FAIL},
    ),
    "shared memory is left": (
        "hot-spare",
        _edit(Kind.LEFTOVERS, {"shared_memory": ["marks"]}),
        {"no-orphans": FAIL},
    ),
    "a fault is not healed": (
        "straggler",
        _drop(Kind.FAULT_HEALED),
        {"no-orphans": FAIL, "liveness": OPEN},
    ),
    "a clock is early": ("hot-spare", _early("w1", 200), {"happens-before": FAIL}),
    "a killed rank was asked to end": (
        "hot-spare",
        _edit_exit("w2", expected=True),
        {"ending": FAIL},
    ),
    "a rank never was ready": ("hot-spare", _never_ready, {"lifecycle": FAIL}),
    "a save was never begun": (
        "hot-spare",
        _drop(Kind.CHECKPOINT_SAVING, step=20),
        {"lifecycle": FAIL},
    ),
    "nobody decided on the recovery": ("hot-spare", _drop(Kind.DECISION), {"recovery-shown": FAIL}),
    "survivors never left the generation that failed": (
        "hot-spare",
        _both(_drop(Kind.PARKED), _drop(Kind.SURVIVORS_PARKED)),
        {"recovery-shown": FAIL, "lifecycle": FAIL},
    ),
    "nobody looked for leftovers": ("hot-spare", _drop(Kind.LEFTOVERS), {"no-orphans": OPEN}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_its_checker_red_and_no_other(name: str) -> None:
    base, mutate, expected = MUTANTS[name]
    make, faults = CLEAN[base]
    script = make()
    mutate(script)
    assert red(evidence_of(script, faults)) == expected


def test_every_checker_has_a_mutant() -> None:
    elsewhere = {"no-lost-commit", "evidence-complete", "identity"}
    assert {name for _, _, expected in MUTANTS.values() for name in expected} | elsewhere == set(
        CHECKERS
    )
