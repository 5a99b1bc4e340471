"""Generations that were lost before they were ready: what later ones resume from all the same."""

from __future__ import annotations

import pytest

from tests.support import arms
from tests.support.arms import FAIL, KILL, evidence_of, red
from tests.support.logs import STEPS, Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.record.lineage import history_of

FRESH = ("w4", "w5", "w6", "w7")


def lost_while_it_restored(*, resume: int = 20, stated: bool = True) -> Script:
    """All die, and one of those that restored the checkpoint dies too; the others go on with what
    they restored.
    """
    script = arms.interrupted("checkpoint-restart")
    script.orchestrator(
        Kind.DECISION, actions=["spawn warm worker"] * 4, reason="restart all from a checkpoint"
    )
    for name in ("w0", "w1", "w3"):
        script.exit(name, signal=9, expected=True)
    for name in FRESH:
        script.spawn(name)
    script.form(
        FRESH, state="checkpoint", cause="failure", resume=resume, checkpoint=f"step-{resume}"
    )
    script.lines.remove(script.find(Kind.GENERATION_READY)[-1])
    for line in script.find(Kind.STATE_READY)[-4:] if not stated else ():
        script.lines.remove(line)
    script.form(FRESH[:3], state="peer", cause="failure", resume=resume)
    script.train(STEPS)
    return script.finish(healed=["kill"])


@pytest.mark.parametrize(
    ("resume", "stated", "verdict"), [(20, True, None), (10, True, FAIL), (20, False, FAIL)]
)
def test_who_restored_and_then_lost_a_peer_goes_on_from_there(
    resume: int, stated: bool, verdict: str | None
) -> None:
    script = lost_while_it_restored(resume=resume, stated=stated)
    assert red(evidence_of(script, [KILL])).get("no-lost-commit") == verdict


def test_a_step_whose_end_was_told_in_a_generation_that_was_lost_is_of_the_one_before() -> None:
    script = arms.interrupted("drop-replica", committers=("w0", "w1"))
    arms.park(script, ("w0", "w1", "w3"), {"w0": 27, "w1": 27})
    script.form(("w0", "w1", "w3"), state="peer", cause="failure", resume=27)
    script.edit(Kind.GENERATION_STARTED, {"finish": 27}, generation=2)
    script.commit(27, ("w3",))
    script.lines.remove(script.find(Kind.GENERATION_READY)[-1])
    script.form(("w0", "w1", "w3"), state="peer", cause="failure", resume=27)
    script.train(STEPS)
    script.finish(healed=["kill"])
    history = history_of(script.log())
    assert history.lineage[27].generation == 1 and not history.runs_of(2)
    assert not red(evidence_of(script, [KILL])).keys() & {
        "sample-accounting",
        "step-arithmetic",
        "no-lost-commit",
    }
