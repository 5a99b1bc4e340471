"""What a scenario may say, and what will yet surprise: warnings."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.catalogue import Catalogue
from chaos.faultspec import StepsDuration
from chaos.loading.diagnostics import Loc, Problem
from chaos.scenario import CheckpointTarget, FaultSpec, Scenario

HEALTHY_STEPS = 5
"""Steps that the liveness checker needs after the last fault."""


def warnings(scenario: Scenario, catalogue: Catalogue) -> Iterator[Problem]:
    """What is allowed, and yet will surprise."""
    if not scenario.faults:
        yield Problem(loc=("faults",), message="no faults: the run can only be inconclusive", on_key=True)
    steps = scenario.workload.steps
    for index, fault in enumerate(scenario.faults):
        yield from _too_late(fault, steps, ("faults", index, "at"), scenario.invariants)
        if (
            fault.retrigger != "once"
            and fault.at.time is None
            and not fault.at.all_steps()
            and not fault.at.event
        ):
            message = "times of mtbf, weibull and trace are not replayed: each would fire again after every rollback"
            yield Problem(loc=("faults", index, "retrigger"), message=message)
        target, every = fault.target.checkpoint, scenario.workload.checkpoint.every
        if isinstance(target, CheckpointTarget) and target.step % every:
            message = f"no checkpoint is made at step {target.step}: one is made every {every} steps"
            yield Problem(loc=("faults", index, "target", "checkpoint", "step"), message=message)


def _too_late(fault: FaultSpec, steps: int, loc: Loc, invariants: object) -> Iterator[Problem]:
    """A fault past the end, or so late that too few steps are left to show that the job is healthy again."""
    points = fault.at.all_steps()
    if not points:
        return
    names = ("step", "steps", "until", "trace", "nth")
    at = (*loc, next(name for name in names if getattr(fault.at, name) is not None))
    past = [step for step in points if step > steps]
    if past:
        message = (
            f"fault {fault.id!r} is due at step {past[0]}, but the run ends at step {steps}: it would be "
            f"inconclusive; lower at.step or raise workload.steps"
        )
        yield Problem(loc=at, message=message)
        return
    last = points[-1] + (fault.duration.steps if isinstance(fault.duration, StepsDuration) else 0)
    judged = invariants == "default" or (isinstance(invariants, list) and "liveness" in invariants)
    if judged and steps - last < HEALTHY_STEPS:
        message = (
            f"fault {fault.id!r} leaves {max(0, steps - last)} steps before the end at step {steps}, and liveness "
            f"needs {HEALTHY_STEPS} healthy ones: raise workload.steps to {last + HEALTHY_STEPS} or more"
        )
        yield Problem(loc=at, message=message)
