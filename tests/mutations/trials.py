"""What a comparison makes of the base ``compare``, changed by a mutation: the trial, as its report
has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.mutations.bases import ARMS, base
from tests.mutations.recorded import resolved_of
from tests.mutations.tape import Mutation, Tape
from trainchaos.chaos.events.log import Log
from trainchaos.harness.compare.result.model import Trial
from trainchaos.harness.compare.result.records import ArmRecord
from trainchaos.harness.compare.result.trials import trial_of

BASE = "compare"


def trial(mutation: Mutation | None = None) -> Trial:
    """Of both arms, each judged against its own scenario."""
    made = base(BASE)
    control = Tape.of(made.control)
    faulted = Tape.of(made.faulted, control)
    if mutation is not None:
        mutation.change(faulted)
    arms = dict(zip(ARMS, (faulted.log(), control.log()), strict=True))
    found = {name: _record(name, arms) for name in ARMS}
    why = {name: record.contradictions for name, record in found.items()}
    trusted = None if why["control"] else arms["control"]
    return trial_of(
        arms["faulted"],
        trusted,
        label="torchrun default",
        family="kill",
        seed=made.seed,
        run="run",
        control_run="control",
        verdict=found["faulted"].verdict("pass"),
        reproduce="",
        contradictions=why["faulted"],
        against=found["control"].notes("its control"),
    )


def _record(arm: str, logs: Mapping[Any, Log]) -> ArmRecord:
    resolved = resolved_of(BASE, arm)
    (cell,) = resolved.cells
    return ArmRecord(
        log=logs[arm], resolved=resolved, cell=cell, name=cell.scenario.name, seed=resolved.seed
    )


Effect = Mapping[str, object]
NOT_REFUTED: Mapping[str, Effect] = {
    "compare: a rank is never seen to end": {"verdict": "fail"},
    "compare: a process is left": {"verdict": "fail"},
    "compare: nobody looked for leftovers": {"verdict": "inconclusive"},
    "compare: it left a process running": {"verdict": "fail"},
    "compare: the job gave up": {"goodput": 0.0, "verdict": "fail"},
    "compare: a failure without a fault": {"note": "its control fails: detection: "},
    "compare: a fault in the run without one": {
        "note": "its control is left out: identity: ",
        "control_goodput": None,
        "step_time": None,
    },
    "compare: the end is missing": {"goodput": None, "verdict": "inconclusive"},
    "compare: a step that the run cannot have": {"verdict": "inconclusive"},
}
"""Mutation -> what it does to its trial, where that still counts. Of others its verdict is not a
pass.
"""
