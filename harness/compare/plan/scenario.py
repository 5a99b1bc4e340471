"""Makes the scenario of one arm: the faults of a family applied to a stack's command. It is an
ordinary scenario file, so that anyone can repeat an arm with ``chaos run``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.files import replacing
from trainchaos.chaos.home import HOME, import_root
from trainchaos.harness.compare.environments.stack import Drive
from trainchaos.harness.compare.plan.plan import Arm, Family

SEEN_FROM_OUTSIDE = (
    "fault-landed",
    "landing",
    "detection",
    "liveness",
    "recovery-shown",
    "identity",
    "ending",
    "no-orphans",
    "evidence-complete",
)
# a job whose processes restart repeatedly makes no step but sends heartbeats
IDLE_BEYOND_S = 30.0
# times the deadline: a job that repeatedly restarts from step 0 would make steps forever
LONGEST = 3.0
LONGEST_START_S, LONGEST_STEP_S = 300.0, 1.0  # minimum time for an arm, whatever the deadline


def scenario_of(arm: Arm, family: Family, drive: Drive, *, deadline_s: float) -> dict[str, Any]:
    """The scenario as plain values. ``family``: of the arm; for a control, one with the same
    workload.

    Only the family's faults are used. Its recovery, SLAs, invariants and expectations concern one
    stack, while a comparison observes every stack.
    """
    spec = family.cell.scenario.workload
    workload: dict[str, Any] = {
        "command": list(drive.argv),
        "directory": str(HOME),
        "env": {"PYTHONPATH": str(import_root()), **drive.env},
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
        "description": f"{arm.label}: {family.planned.about if arm.family else 'no fault'}",
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
    """Write it as YAML, atomically. Raises InfrastructureError if it cannot be written."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 120
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as stream:
            yaml.dump(dict(scenario), stream)
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {path}: {error.strerror}", hint="free disk space"
        ) from error
