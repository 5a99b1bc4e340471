"""Ranks on machines with clocks of their own: hours off, drifting, measured well, badly or not at
all.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import arms
from tests.support.arms import CLEAN, KILL, control, evidence_of, judged
from tests.support.clusters.nodelogs import HOURS_NS, NEAR, Clock, on_nodes
from tests.support.logs import MS, Line, Script
from trainchaos.chaos.events.clocks import ClockMeasurement, Clocks, Machine
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.chaos.scenario.model import SlaCheck
from trainchaos.harness.judge.measure.measure import METRICS, measure
from trainchaos.harness.judge.measure.samples import summarise
from trainchaos.harness.judge.verdict.gates import judge_sla, judge_slas


def facts(script: Script, faults: list[dict[str, Any]]) -> tuple[object, ...]:
    """All that ``results.json`` holds of an arm but the bounds."""
    evidence = evidence_of(script, faults)
    incidents = [i.model_dump(exclude={"clock_bound_s"}) for i in evidence.measures.incidents]
    return incidents, evidence.measures.values, judged(evidence)


@pytest.mark.parametrize("ahead_ns", [HOURS_NS, -HOURS_NS], ids=["ahead", "behind"])
@pytest.mark.parametrize("name", CLEAN)
def test_a_clock_that_is_hours_off_makes_no_difference(name: str, ahead_ns: int) -> None:
    make, faults = CLEAN[name]
    near = facts(on_nodes(make(), Clock(ahead_ns=0), boot=NEAR), faults)
    assert facts(on_nodes(make(), Clock(ahead_ns=ahead_ns)), faults) == near


def test_raw_logs_stay_as_they_were_written() -> None:
    script = on_nodes(arms.hot_spare(), Clock())
    (first,) = [e for e in script.events()["w0"] if e.kind is Kind.ACTOR_STARTED]
    assert first.time_ns > HOURS_NS
    assert script.log().actors["w0"].events[0].time_ns < HOURS_NS


def test_a_machine_of_the_same_boot_needs_no_measurement() -> None:
    script = arms.hot_spare()
    script.lines.append(
        Line(
            ORCHESTRATOR,
            Kind.ACTOR_STARTED,
            0,
            0,
            None,
            {"pid": 1, "host": "h", "wall_ns": 0, "boot": NEAR},
        )
    )
    log = on_nodes(script, Clock(ahead_ns=0), every_ms=None, boot=NEAR).log()
    assert not log.clocks.unsure()
    assert log.clock_bound_s == 0


def test_a_clock_that_nobody_measured_is_inconclusive_and_never_a_pass() -> None:
    from trainchaos.harness.judge.checkers import OF_SUPERVISOR, check_all

    script = on_nodes(arms.hot_spare(), Clock(ahead_ns=0), every_ms=None)
    findings = check_all(evidence_of(script, [KILL]))
    passing = {name for name, finding in findings.items() if finding.verdict == "pass"}
    assert passing <= {*OF_SUPERVISOR}
    assert "), whose clock was never measured" in findings["evidence-complete"].witness


def test_a_clock_that_moved_more_than_measured_is_inconclusive() -> None:
    script = on_nodes(
        arms.hot_spare(), Clock(), error_ns=lambda at: 7 * MS if at > 1000 * MS else 0
    )
    log = script.log()
    assert any(
        "the clock of node 0 (host0) moved by 7.000 ms in 0.5 s" in problem
        for problem in log.clocks.unsure().values()
    )


DRIFTS = st.floats(min_value=-90e-6, max_value=90e-6)


@given(
    drift=DRIFTS,
    ahead=st.integers(-HOURS_NS, HOURS_NS),
    errors=st.lists(st.integers(-200_000, 200_000), min_size=1, max_size=5),
    at_ms=st.lists(st.integers(0, 90_000), min_size=2, max_size=9),
)
def test_the_truth_is_within_the_bound_and_time_runs_forwards(
    drift: float, ahead: int, errors: list[int], at_ms: list[int]
) -> None:
    clock, machine = Clock(ahead_ns=ahead, drift=drift), Machine(0, "h")
    for number, error in enumerate(errors):
        at = (5_000 + number * 10_000) * MS
        machine.measured.append(
            ClockMeasurement(time_ns=at, offset_ns=clock.at(at) - at + error, bound_ns=200_000)
        )
    assert machine.problems() == []
    seen = []
    for at in (ms * MS for ms in sorted(at_ms)):
        offset, bound = machine.offset_ns(clock.at(at))
        assert abs(clock.at(at) - offset - at) <= bound + 2
        seen.append(clock.at(at) - offset)
    assert seen == sorted(seen)


def test_the_bound_grows_with_the_distance_from_a_measurement() -> None:
    machine = Machine(0, "h")
    machine.measured.append(ClockMeasurement(time_ns=0, offset_ns=0, bound_ns=1000))
    assert machine.offset_ns(0) == (0, 1000)
    assert machine.offset_ns(10**10) == (0, 1000 + 2_000_000)


def test_the_corrected_clock_does_not_jump_from_one_measurement_to_the_next() -> None:
    machine = Machine(0, "h")
    for at, offset in ((0, 0), (10**10, 1_000_000)):
        machine.measured.append(ClockMeasurement(time_ns=at, offset_ns=offset, bound_ns=1_000_000))
    last = machine.measured[-1].node_ns
    assert [machine.offset_ns(at)[0] for at in (0, last // 2, last - 1, last)] == [
        0,
        500_000,
        1_000_000,
        1_000_000,
    ]


def test_a_node_that_comes_back_as_another_machine_has_a_clock_of_its_own() -> None:
    clocks = Clocks()

    def tell(kind: Kind, time_ns: int, **data: Any) -> None:
        clocks.observe(
            Event(
                kind=kind,
                actor=ORCHESTRATOR,
                seq=0,
                time_ns=time_ns,
                generation=0,
                step=None,
                data=data,
            )
        )

    for boot, offset, process in (("one", 1000, "w0"), ("two", 5000, "w1")):
        tell(Kind.NODE_JOINED, 0, node=0, host=boot, boot=boot, address="", devices=[])
        tell(Kind.CLOCK_MEASURED, 0, node=0, offset_ns=offset, bound_ns=0)
        tell(Kind.PROCESS_SPAWNED, 0, process=process, pid=1, role="worker", mode="cold", node=0)
    times = [
        clocks.corrected(
            Event(kind=Kind.ACTOR_ENDED, actor=name, seq=0, time_ns=9000, generation=0, step=None)
        ).time_ns
        for name in ("w0", "w1")
    ]
    assert times == [8000, 4000]


# ---- what the bound does to values and verdicts


def test_every_metric_that_reads_a_ranks_clock_has_its_bound() -> None:
    plain = measure(arms.restart().log(), control("checkpoint-restart").log())
    assert set(plain.bounds.values()) == {0}
    far = measure(
        on_nodes(arms.restart(), Clock(), bound_ns=1_000_000, every_ms=1).log(),
        control("checkpoint-restart").log(),
    )
    bound_s = far.history.log.clock_bound_s
    assert 0.001 <= bound_s < 0.00101
    assert [incident.clock_bound_s for incident in far.incidents] == [bound_s]
    assert {name for name, bound in far.bounds.items() if bound} == {
        *("recovery_time", "time_to_full_rate", "regroup_time", "restore_time", "redo_time"),
        *("time_to_redundancy", "step_time", "goodput", "ettr", "mfu"),
    }
    assert far.bounds["recovery_time"] == bound_s
    assert far.bounds["step_time"] == 2 * bound_s
    assert far.bounds["goodput"] == pytest.approx(2 * bound_s * 2 / far.history.wall_s)


@pytest.mark.parametrize(
    ("clause", "verdict"),
    [
        ("median < 600ms", "pass"),
        ("median < 511ms", "pass"),
        ("median < 509ms", "inconclusive"),
        ("median < 491ms", "inconclusive"),
        ("median < 489ms", "fail"),
        ("all < 509ms", "inconclusive"),
        ("min > 489ms", "pass"),
        ("min > 491ms", "inconclusive"),
        ("min > 511ms", "fail"),
    ],
)
def test_a_margin_within_the_bound_decides_nothing(clause: str, verdict: str) -> None:
    check = SlaCheck(check=clause)
    blurred = summarise("recovery_time", [0.5, 0.5, 0.5], 0.010)
    found = judge_sla("c", "recovery_time", check, blurred, None, "")
    assert found.verdict == verdict
    assert ("blur it by 0.0100 s" in found.detail) == (verdict == "inconclusive")
    sharp = summarise("recovery_time", [0.5])
    assert judge_sla("c", "recovery_time", check, sharp, None, "").verdict in ("pass", "fail")


def test_clauses_of_a_cell_get_the_bound_of_their_metric() -> None:
    cell = arms.cell_of(
        "hot-spare",
        [KILL],
        sla={name: [{"check": "max < 509ms"}] for name in ("recovery_time", "detection_time")},
    )
    bounds = {"recovery_time": 0.01}
    metrics = {name: summarise(name, [0.5], bounds.get(name, 0.0)) for name in METRICS}
    found = judge_slas(cell, metrics, {}, "")
    assert {sla.metric: sla.verdict for sla in found} == {
        "recovery_time": "inconclusive",
        "detection_time": "pass",
    }


def fenced_by(late_ns: int) -> Script:
    """w3, of which nothing was heard, commits step 27 for its generation ``late_ns`` after the next
    one began.
    """
    script = arms.hot_spare()
    (fence,) = script.find(Kind.GENERATION_STARTED, generation=2)
    script.drop(Kind.PARKED, actor="w3")
    script.find(Kind.SURVIVORS_PARKED)[0].data["processes"].pop("w3")
    (last,) = script.find(Kind.STEP_COMMITTED, actor="w3", step=26, generation=1)
    script.lines.append(
        Line(
            "w3",
            Kind.STEP_COMMITTED,
            fence.time_ns + late_ns,
            1,
            27,
            {**last.data, "optimizer_step": 27},
        )
    )
    return script


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("late_ms", "bound_ms", "verdict"),
    [(3, 0, "fail"), (3, 1, "fail"), (3, 5, "inconclusive"), (-1, 5, "inconclusive")],
)
def test_a_commit_near_the_fence_is_fenced_only_when_the_clocks_say_so(
    late_ms: int, bound_ms: int, verdict: str
) -> None:
    script = on_nodes(fenced_by(late_ms * MS), Clock(), bound_ns=bound_ms * MS, every_ms=1)
    assert judged(evidence_of(script, [KILL]))["single-writer"].verdict == verdict


def test_what_the_supervisor_had_heard_before_the_fence_needs_no_clock() -> None:
    script = on_nodes(arms.hot_spare(), Clock(), bound_ns=400 * MS)
    assert judged(evidence_of(script, [KILL]))["single-writer"].verdict == "pass"
