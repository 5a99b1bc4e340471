"""Invariants of a command, of which only the outside is seen: which can be judged, and what the others lack."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from chaos.events import Kind
from harness.checkers.evidence import Evidence, passed, unknown
from harness.observed import stride_of
from harness.results import Finding

PROGRESS = "progress"
LACKING: Mapping[str, str] = MappingProxyType(
    {
        "sample-accounting": "which samples each step trained on",
        "no-lost-commit": "which checkpoints it wrote and restored",
        "single-writer": "who wrote what",
        "replica-equality": "digests of the ranks' state",
        "checkpoint-integrity": "which checkpoints it wrote, refused and restored",
        "nan-containment": "gradients, and steps it refused to take",
        "membership": "what its ranks were told of each other",
        "step-arithmetic": "optimizer and scheduler steps, samples and learning rates",
    }
)
"""Checker -> the evidence that a command does not give."""


def lacking(name: str) -> Finding:
    """The finding of a checker that cannot judge a command."""
    cure = f"leave it out by saying so, invariants: {{leave_out: [{name}]}}"
    return unknown(f"a command does not tell {LACKING[name]}; {cure}")


def progress(evidence: Evidence) -> Finding:
    """The command was seen at work: its ranks were found, and its steps reported from the first on."""
    history = evidence.history
    reports = list(history.log.of(Kind.STEP_REPORTED))
    end = history.finished.data["reason"] if history.finished else "the harness did not get to the end"
    if not reports:
        key = "workload.progress" if "workload.progress.regex matched" in end else "workload.command"
        return unknown(f"{evidence.place(key)}{end}")
    found = len(history.generations[0].members) if history.generations else 0
    if found != history.info.ranks:
        return unknown(
            f"{evidence.place('workload.ranks')}{found} of {history.info.ranks} ranks were found among the command's "
            "processes: each needs RANK (or LOCAL_RANK) in its environment, or a beacon that says it; or correct ranks"
        )
    first, stride = reports[0].step or 0, stride_of(history)
    if first > max(stride, 1):
        return unknown(
            f"the first step reported was {first}: the script went on from an earlier run; give each arm a directory "
            "of its own, $CHAOS_SCRATCH"
        )
    every = "" if stride == 1 else f", every {stride} steps"
    return passed(f"{found} ranks, {len(reports)} reports{every}, up to step {history.committed_step}")


def loss_equality(evidence: Evidence) -> Finding:
    """The losses that were reported are the control arm's, number by number; nothing is known of the state."""
    control = evidence.control_history
    if control is None:
        return passed("nothing to check: this is the control arm, or there is none")
    mine = {s: run.loss for s, run in evidence.history.lineage.items() if not math.isnan(run.loss)}
    theirs = {s: run.loss for s, run in control.lineage.items() if not math.isnan(run.loss)}
    steps = sorted(mine.keys() & theirs.keys())
    cure = "; leave it out by saying so, invariants: {leave_out: [loss-equality]}"
    if not steps:
        return unknown(f"the command reports no losses that could be compared{cure}")
    different = next((step for step in steps if mine[step] != theirs[step]), None)
    if different is None:
        return passed(f"the reported losses are the same in {len(steps)} steps")
    return unknown(
        f"reported loss {mine[different]!r} at step {different}, the control arm had {theirs[different]!r}: whether "
        f"the script is deterministic is not known{cure}"
    )
