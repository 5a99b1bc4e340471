"""Alarms that nothing explains, and when a busy machine may explain them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.arms import evidence_of, inject, land, plan
from tests.support.logs import Script
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.harness.judge.checkers.faults.promised import OF_TIMES, alarms
from trainchaos.harness.judge.measure.pressure import others_of
from trainchaos.harness.judge.results import Finding

FAULT: dict[str, Any] = {
    "id": "slow",
    "kind": "straggler",
    "params": {"factor": 2},
    "target": {"rank": 2},
    "at": {"step": 27},
    "expect": {"alarm": "straggler"},
}


def found(*raised: str, busy: bool) -> Finding:
    """Of an arm in which alarms of the job are raised before any fault."""
    script = Script("drop-replica", arm="faulted")
    script.train(10)
    for what in raised:
        unnamed = dict.fromkeys(("device", "node", "rank"))
        script.orchestrator(
            Kind.HEALTH_ALARM,
            what=what,
            lasted_s=1.0,
            value=2.0,
            threshold=1.0,
            evidence="",
            **unnamed,
        )
    script.train(script.steps)
    if busy:
        script.orchestrator(Kind.MACHINE_BUSY, others=1.5, cpus=2)
    script.finish()
    return alarms(evidence_of(script, [FAULT]))


@pytest.mark.parametrize("what", sorted(OF_TIMES))
def test_what_takes_long_beside_other_programs_is_inconclusive(what: str) -> None:
    assert found(what, busy=False).verdict == "fail"
    beside = found(what, busy=True)
    assert beside.verdict == "inconclusive"
    assert beside.witness.startswith("the machine was too busy:") and what in beside.witness


@pytest.mark.parametrize(
    ("actor", "others"),
    [("w1", 1.5), (ORCHESTRATOR, 0), (ORCHESTRATOR, 0.1)],
)
def test_a_rank_or_a_little_use_excuses_nothing(actor: str, others: Any) -> None:
    script = Script("drop-replica", arm="faulted")
    script.train(script.steps)
    script.write(actor, Kind.MACHINE_BUSY, others=others, cpus=2)
    script.finish()
    assert others_of(script.log()) is None


@pytest.mark.parametrize("what", ["loss-spike", "thermal-limit", "digest-mismatch"])
def test_a_busy_machine_explains_no_other_alarm(what: str) -> None:
    assert found(what, "straggler", busy=True).verdict == "fail"


@pytest.mark.parametrize(
    ("due", "busy", "verdict"),
    [
        ("straggler", False, "fail"),
        ("straggler", True, "inconclusive"),
        ("throughput-drop", True, "inconclusive"),
        ("hang", True, "fail"),
        ("digest-mismatch", True, "fail"),
    ],
)
def test_an_alarm_that_has_to_be_told_from_noise_may_be_hidden_in_it(
    due: str, busy: bool, verdict: str
) -> None:
    script = Script("drop-replica", arm="faulted")
    plan(script, "slow", "straggler", rank=2)
    script.train(26)
    inject(script, "slow", "straggler", process="w2", rank=2)
    land(script, "slow", "rank: time of its own", {"factor": 2})
    script.train(script.steps)
    if busy:
        script.orchestrator(Kind.MACHINE_BUSY, others=1.5, cpus=2)
    script.finish()
    finding = alarms(evidence_of(script, [{**FAULT, "expect": {"alarm": due}}]))
    assert finding.verdict == verdict and "and did not" in finding.witness
    assert finding.witness.startswith("the machine was too busy:") == (verdict == "inconclusive")
