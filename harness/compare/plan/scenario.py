"""The scenario of one arm: the faults of a family, done to a stack's own command. An ordinary file
that ``chaos run`` takes, so that whoever doubts a number can play its arm again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from chaos.errors import InfrastructureError
from harness.compare.environments.stack import ROOT, Drive
from harness.compare.plan.plan import Arm, Family

SEEN_FROM_OUTSIDE = (
    "fault-landed",
    "landing",
    "detection",
    "liveness",
    "happens-before",
    "lifecycle",
    "recovery-shown",
    "identity",
    "ending",
    "no-orphans",
    "evidence-complete",
)
# a job whose processes begin anew again and again makes no step and shows signs of life
IDLE_BEYOND_S = 30.0
# times the deadline: a job that goes back to step 0 again and again makes steps for ever
LONGEST = 3.0
LONGEST_START_S, LONGEST_STEP_S = 300.0, 1.0  # whatever the deadline, an arm has so long


def scenario_of(arm: Arm, family: Family, drive: Drive, *, deadline_s: float) -> dict[str, Any]:
    """The scenario as plain values. ``family``: the arm's, or of a control one whose workload it
    trains.

    Only the faults are the family's own: what it says about recovery, SLAs, invariants and
    expectations is about one stack, and what a comparison is about is what happens under each.
    """
    spec = family.cell.scenario.workload
    workload: dict[str, Any] = {
        "command": list(drive.argv),
        "directory": str(ROOT),
        "env": {"PYTHONPATH": str(ROOT), **drive.env},
        "ranks": spec.ranks,
        "steps": spec.steps,
        "global_batch": spec.global_batch,
        "progress_deadline": deadline_s,
        "points": True,
        "restarts": drive.restarts,
        "checkpoint": {"directory": drive.checkpoints},
    }
    start_s = workload["start_deadline"] = max(deadline_s, LONGEST_START_S)
    faults = [
        {
            key: value
            for key, value in fault.model_dump(mode="json", exclude_defaults=True).items()
            if key != "expect"
        }
        for fault in family.cell.scenario.faults
        if arm.family is not None
    ]
    return {
        "version": 1,
        "name": arm.id.rpartition(".")[0],
        "description": f"{arm.label}: {family.about if arm.family else 'no fault'}",
        "seed": arm.seed,
        "requires": family.cell.scenario.requires.model_dump(mode="json", exclude_defaults=True),
        "workload": workload,
        "faults": faults,
        "baseline": "none",
        "invariants": list(SEEN_FROM_OUTSIDE),
        "stop_conditions": [
            {"when": f"no_committed_step_for > {start_s + IDLE_BEYOND_S:g}s"},
            {
                "when": (
                    "wall_time >"
                    f" {start_s + max(LONGEST * deadline_s, spec.steps * LONGEST_STEP_S):g}s"
                )
            },
        ],
    }


def write(path: Path, scenario: Mapping[str, Any]) -> None:
    """Write it as YAML, whole or not at all. Raises InfrastructureError when the disk refuses."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 120
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as stream:
            yaml.dump(dict(scenario), stream)
        os.replace(temporary, path)
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {path}: {error.strerror}", hint="free disk space"
        ) from error
