"""Times that cannot be: each is seen, and what clocks of several machines explain is not held
against anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import logs
from tests.support.arms import CLEAN, FAIL, control, evidence_of
from tests.support.clusters.nodelogs import NEAR, Clock, on_nodes
from tests.support.logs import MS, Script
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.harness.judge.checkers.record.happens_before import happens_before
from trainchaos.harness.judge.order.drift import DRIFT_STEPS


def _moved(script: Script, by_ns: Callable[[int], int], actor: str = "w1") -> Script:
    """All lines of an actor by another clock."""
    for line in script.lines:
        if line.actor == actor:
            line.time_ns += by_ns(line.time_ns)
    return script


def _line(script: Script, kind: Kind, process: str | None = None, **which: int) -> logs.Line:
    return next(x for x in script.find(kind, **which) if process in (None, x.data.get("process")))


def _earlier(kind: Kind, by_ms: int, **which: Any) -> Callable[[Script], None]:
    def change(script: Script) -> None:
        _line(script, kind, **which).time_ns -= by_ms * MS

    return change


def _later(kind: Kind, by_ms: int, **which: Any) -> Callable[[Script], None]:
    return _earlier(kind, -by_ms, **which)


def _answer(script: Script, name: str = "hot-spare") -> tuple[str, str]:
    finding = happens_before(evidence_of(script, CLEAN[name][1]))
    return finding.verdict, finding.witness


@pytest.mark.parametrize("by_ms", [-200, 200], ids=["early", "late"])
@pytest.mark.parametrize("actor", ["w0", "w1"])
def test_a_rank_whose_clock_is_off_is_seen(actor: str, by_ms: int) -> None:
    script = _moved(CLEAN["hot-spare"][0](), lambda _: by_ms * MS, actor)
    verdict, witness = _answer(script)
    assert verdict == FAIL
    assert actor in witness


def test_a_rank_alone_whose_clock_is_early_is_seen_by_its_supervisor() -> None:
    """Steps tell nothing where there is nobody to wait for."""
    script = control("hot-spare")
    for line in script.lines:
        if (
            line.actor in ("w0", "w1", "w2", "w3")
            and line.step is None
            and line.kind is Kind.GROUP_FORMED
        ):
            line.time_ns -= 5 * MS
    found = happens_before(evidence_of(script, []))
    assert found.verdict == FAIL
    assert "had begun to form its group before the generation was started" in found.witness


def _long(rate: float) -> Script:
    script = control("hot-spare", steps=DRIFT_STEPS + 10, step_ms=40)
    started = script.lines[0].time_ns
    return _moved(script, lambda time: round((time - started) * rate))


@pytest.mark.parametrize("rate", [0.01, -0.01])
def test_a_clock_that_runs_at_another_rate_is_seen(rate: float) -> None:
    found = happens_before(evidence_of(_long(rate), []))
    assert found.verdict == FAIL
    assert f"the clock of w1 runs {rate:+.1%}"[:-3] in found.witness


@pytest.mark.parametrize("rate", [0.0, 200e-6])
def test_a_clock_within_what_machines_do_is_not(rate: float) -> None:
    assert happens_before(evidence_of(_long(rate), [])).verdict == "pass"


def test_a_rank_that_becomes_slow_is_no_clock_that_runs_wrong() -> None:
    """From some step on all its commits come late, as beside a straggler; or later and later by
    jerks.
    """
    for late_ms in (lambda step: 15 if step > 25 else 0, lambda step: (step * 7919) % 23):
        script = control("hot-spare", steps=DRIFT_STEPS + 10, step_ms=40)
        for line in script.find(Kind.STEP_COMMITTED):
            if line.actor == "w1":
                line.time_ns += late_ms(line.step or 0) * MS
        assert happens_before(evidence_of(script, [])).verdict == "pass"


MOVES: dict[str, tuple[Callable[[Script], None], str]] = {
    "healed before it was injected": (
        _earlier(Kind.FAULT_HEALED, 2000),
        "kill healed before it was injected",
    ),
    "undone before it was injected": (
        lambda script: script.edit(Kind.FAULT_HEALED, {"begun_ns": 1}),
        "the undoing of kill began before it was injected",
    ),
    "undone after its heal": (
        lambda script: script.edit(Kind.FAULT_HEALED, {"begun_ns": 10**18}),
        "kill healed before its undoing began",
    ),
    "landed before it was injected": (
        _earlier(Kind.FAULT_LANDED, 100),
        "kill landed before it was injected",
    ),
    "the end of the job": (_earlier(Kind.RUN_FINISHED, 200), "after the job was done"),
    "the end of a process": (
        _earlier(Kind.PROCESS_EXITED, 200, process="w0"),
        "w0 wrote actor_ended after it had ended",
    ),
    "a death is declared before the process's last words": (
        _earlier(Kind.FAILURE_DETECTED, 40),
        "w2 wrote batch_taken after its end had been declared",
    ),
    "a generation answers what comes later": (
        _later(Kind.FAILURE_DETECTED, 30),
        "generation 2 answers a failure that was declared after it began",
    ),
    "a state after all was ready": (
        _later(Kind.STATE_READY, 5, generation=2),
        "held its state after the generation was ready",
    ),
    "a state before the generation": (
        _earlier(Kind.STATE_READY, 50, generation=2),
        "held its state before",
    ),
    "a parked rank": (_later(Kind.PARKED, 5), "parked after the supervisor had heard of it"),
    "a process that begins before it is started": (
        _earlier(Kind.ACTOR_STARTED, 300),
        "began before it was started",
    ),
    "a process that is ready before it begins": (
        _later(Kind.ACTOR_STARTED, 5),
        "was ready before it began",
    ),
    "a commit before another's batch": (
        _later(Kind.BATCH_TAKEN, 60, step=12),
        "committed step 12 before w0 had taken its batch",
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_out_of_order_is_seen(name: str) -> None:
    change, words = MOVES[name]
    script = CLEAN["hot-spare"][0]()
    change(script)
    verdict, witness = _answer(script)
    assert (verdict, words in witness) == (FAIL, True), witness


def test_values_are_refused_before_they_are_declared() -> None:
    script = CLEAN["nan"][0]()
    for line in script.find(Kind.NONFINITE_CAUGHT):
        line.time_ns += 60 * MS
    verdict, witness = _answer(script, "nan")
    assert (verdict, "declared before any rank had refused them" in witness) == (FAIL, True), (
        witness
    )


def test_a_rank_commits_in_order() -> None:
    script = CLEAN["hot-spare"][0]()
    one, two = (script.find(Kind.STEP_COMMITTED, step=step)[1] for step in (30, 31))
    one.step, two.step = two.step, one.step
    verdict, witness = _answer(script)
    assert (verdict, "w1 committed step 30 after step 31" in witness) == (FAIL, True), witness


def test_a_save_that_took_less_than_no_time() -> None:
    script = CLEAN["hot-spare"][0]()
    script.edit(Kind.CHECKPOINT_COMMITTED, {"seconds": -0.1})
    assert _answer(script)[0] == FAIL


def test_what_the_clocks_of_machines_explain_is_held_against_nobody() -> None:
    """A node's clock measured 3 ms wrong, within its bound; and beyond a bound that says better."""
    clock = Clock()
    good = on_nodes(CLEAN["hot-spare"][0](), clock, error_ns=lambda _: 3 * MS, bound_ns=4 * MS)
    assert _answer(good)[0] == "pass"
    bad = on_nodes(CLEAN["hot-spare"][0](), clock, error_ns=lambda _: 8 * MS, bound_ns=MS)
    assert _answer(bad)[0] == FAIL


def test_a_lost_node_may_go_on_unseen() -> None:
    script = on_nodes(CLEAN["hot-spare"][0](), Clock(ahead_ns=0), boot=NEAR)
    exited = _line(script, Kind.PROCESS_EXITED, "w2")
    exited.time_ns -= 40 * MS
    script.find(Kind.FAILURE_DETECTED)[0].time_ns -= 40 * MS
    assert _answer(script)[0] == FAIL
    script.lines.append(
        logs.Line(
            ORCHESTRATOR, Kind.NODE_LOST, exited.time_ns - 1, 1, None, {"node": 1, "why": "cut"}
        )
    )
    assert _answer(script)[0] == "pass"


def test_a_recovery_that_took_less_than_no_time() -> None:
    """Whatever order the lines are in: a negative duration is none; within the error of the clocks
    nobody knows.
    """
    from trainchaos.harness.judge.order.slip import durations

    assert durations({"kill": [("recovery", -0.07), ("detection", 0.1)]}, 0.0)[0].sure
    assert not durations({"kill": [("recovery", -0.07)]}, 0.1)[0].sure
