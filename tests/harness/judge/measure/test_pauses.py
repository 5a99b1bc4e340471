"""An evaluation between two steps is no slower step; one that takes longer than it is to
take is.
"""

from __future__ import annotations

import pytest

from tests.support import arms
from tests.support.arms import FAIL, KILL, control, evidence_of, judged
from tests.support.logs import MS, Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.measure.partition import checkpoint_stalls, evaluations
from trainchaos.harness.judge.record.lineage import history_of

TAKES_MS = 200


def evaluating(
    script: Script, every: int, took_ms: int = TAKES_MS, *, since: int = 0, said: bool = True
) -> Script:
    """Rank 0 evaluates after each so many steps of an arm, and everything after that is later;
    ``took_ms``: from step ``since`` on, before it ``TAKES_MS``; ``said``: that it does is in the
    log.
    """
    if said:
        script.find(Kind.RUN_STARTED)[0].data["evaluate"] = {
            "every": every,
            "takes": TAKES_MS / 1000,
        }
    lines = script.lines
    last = {line.step: n for n, line in enumerate(lines) if line.kind is Kind.STEP_COMMITTED}
    later = {
        n: (took_ms if step >= since else TAKES_MS) * MS
        for step, n in last.items()
        if step and step % every == 0
    }
    added = 0
    for number, line in enumerate(lines):
        line.time_ns += added
        added += later.get(number, 0)
    return script


@pytest.mark.parametrize("every", [1, 2, 3, 20])
def test_a_step_is_as_long_as_one_without_an_evaluation(every: int) -> None:
    plain = measure(control("hot-spare", spares=1).log(), None)
    found = measure(evaluating(control("hot-spare", spares=1), every).log(), None)
    assert plain.step_time is not None and plain.ideal is not None and found.ideal is not None
    assert found.step_time == pytest.approx(plain.step_time, abs=1e-3)
    assert found.ideal.step_s == pytest.approx(plain.ideal.step_s, abs=1e-3)
    stalls = found.values["checkpoint_stall"]
    assert stalls == pytest.approx(plain.values["checkpoint_stall"], abs=1e-3)
    assert found.partition.residual_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_job_that_evaluates_often_is_at_full_rate_when_it_is(every: int) -> None:
    script, paired = (
        evaluating(arms.hot_spare(), every),
        evaluating(control("hot-spare", spares=1), every),
    )
    (incident,) = measure(script.log(), paired.log()).incidents
    assert incident.time_to_full_rate is not None and incident.time_to_full_rate < 0.5
    found = judged(evidence_of(script, [KILL], paired))["liveness"]
    assert found.verdict == "pass", found.witness


@pytest.mark.parametrize(("took_ms", "verdict"), [(TAKES_MS, "pass"), (10 * TAKES_MS, FAIL)])
def test_an_evaluation_that_takes_longer_after_a_fault_is_a_slower_job(
    took_ms: int, verdict: str
) -> None:
    script = evaluating(arms.hot_spare(), 1, took_ms, since=27)
    paired = evaluating(control("hot-spare", spares=1), 1)
    assert max(evaluations(history_of(script.log())).values()) == TAKES_MS / 1000
    assert judged(evidence_of(script, [KILL], paired))["liveness"].verdict == verdict


def test_pauses_that_nobody_announced_are_slower_steps() -> None:
    script = evaluating(arms.hot_spare(), 1, 10 * TAKES_MS, since=27, said=False)
    script.find(Kind.RUN_STARTED)[0].data.pop("evaluate", None)
    history = history_of(script.log())
    assert not evaluations(history) and checkpoint_stalls(history)
    assert judged(evidence_of(script, [KILL]))["liveness"].verdict == FAIL
