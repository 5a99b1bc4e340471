"""A fault that was never injected, where ranks held for another as their generation was lost: it is
excused only if nobody came to its point.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import arms
from tests.support.logs import Script
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.fault import PHASES
from trainchaos.harness.inject.occurrence import LET_GO
from trainchaos.harness.judge.checkers.faults.due import shortfall

STEP, SAVE = 10, "checkpoint"
EXCUSE = "the generation was lost whose ranks held there for other"


def fault(name: str, phase: str) -> dict[str, Any]:
    at = {"step": STEP, "phase": phase}
    return {"id": name, "kind": "process-kill", "target": {"rank": 1}, "at": at}


def planned(script: Script, name: str, phase: str) -> None:
    script.orchestrator(
        Kind.FAULT_PLANNED,
        fault=name,
        kind="process-kill",
        target={"ranks": [1]},
        at={"points": [[STEP, phase]]},
        lasts=False,
    )


def begun(phase: str, other: str = "") -> Script:
    """A job that comes to the step in which ranks hold for another fault."""
    script = Script("hot-spare")
    planned(script, "other", other or phase)
    planned(script, "mine", phase)
    script.train(STEP - 1)
    script.take(STEP)
    if (other or phase) == SAVE:
        script.commit(STEP, ("w0", "w1", "w2", "w3"))
        saving(script)
    return script


def saving(script: Script, name: str = "w1") -> None:
    script.write(name, Kind.CHECKPOINT_SAVING, step=STEP, checkpoint=f"step-{STEP}")


def lose(script: Script, resume: int, *, name: str = "w3") -> None:
    """The generation is lost, and all are there again in the next."""
    script.orchestrator(
        Kind.FAILURE_DETECTED,
        step=STEP,
        failure=script.generation,
        cause="hang",
        process=name,
        rank=3,
        detail="still",
    )
    script.form(script.members, state="peer", cause="failure", resume=resume)


def words(script: Script, phase: str, other: str = "") -> str:
    """What is said of the fault that never was injected, in a run that goes on for a while."""
    script.train(STEP + 5)
    script.orchestrator(
        Kind.FAULT_FAILED, step=STEP, fault="other", occurrence=0, reason=f"not fired: {LET_GO}"
    )
    faults = [fault("other", other or phase), fault("mine", phase)]
    evidence = arms.evidence_of(script.finish(), faults)
    mine = evidence.fault("mine")
    assert mine is not None
    return shortfall(evidence, mine, 0) or ""


@pytest.mark.parametrize("phase", PHASES)
def test_where_nobody_made_the_step_again_it_is_excused(phase: str) -> None:
    script = begun(phase)
    lose(script, STEP)
    assert EXCUSE in words(script, phase)


@pytest.mark.parametrize("phase", PHASES)
def test_where_a_later_generation_made_the_step_again_it_should_have_fired(phase: str) -> None:
    script = begun(phase)
    lose(script, STEP - 1)
    script.take(STEP)
    script.commit(STEP, ("w0", "w1", "w2", "w3"))
    saving(script)
    script.step = STEP
    assert "but was never injected" in words(script, phase)


def test_who_only_completes_what_it_had_reduced_does_not_come_there_again() -> None:
    script = begun("optimizer")
    lose(script, STEP)
    script.commit(STEP, ("w1",))
    assert EXCUSE in words(script, "optimizer")


def test_ranks_that_it_was_not_for_do_not_count() -> None:
    script = begun("backward")
    lose(script, STEP - 1)
    script.take(STEP)
    script.commit(STEP, ("w0", "w2", "w3"))
    script.step = STEP
    assert EXCUSE in words(script, "backward")


def test_who_made_the_step_and_did_not_save_it_did_not_come_to_the_save() -> None:
    script = begun(SAVE)
    lose(script, STEP - 1)
    script.take(STEP)
    script.commit(STEP, ("w0", "w1", "w2", "w3"))
    script.step = STEP
    assert EXCUSE in words(script, SAVE)


def test_a_generation_that_was_never_lost_excuses_nothing() -> None:
    """The injector says the same of a fault at the end of a run."""
    script = begun("backward")
    script.commit(STEP, ("w0", "w2", "w3"))
    script.step = STEP
    assert "but was never injected" in words(script, "backward")


def test_a_generation_that_was_lost_before_it_came_there_is_not_meant() -> None:
    script = Script("hot-spare")
    planned(script, "other", SAVE)
    planned(script, "mine", SAVE)
    script.train(STEP - 1)
    script.take(STEP)
    lose(script, STEP - 1)
    script.take(STEP)
    script.commit(STEP, ("w0", "w1", "w2", "w3"))
    saving(script)
    lose(script, STEP)
    assert EXCUSE in words(script, SAVE)


def test_a_generation_comes_to_the_data_of_its_first_step_too() -> None:
    script = Script("hot-spare")
    planned(script, "other", "data")
    planned(script, "mine", "data")
    script.train(STEP - 2)
    lose(script, STEP - 1)  # which some had completed
    lose(script, STEP)
    assert EXCUSE in words(script, "data")
