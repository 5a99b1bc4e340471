"""Whether non-finite values were contained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, unknown, verdict_of
from trainchaos.harness.judge.results import Finding


def nan_containment(evidence: Evidence) -> Finding:
    """No step was committed with a non-finite loss or gradient norm. A planted value that nobody
    caught shows in one of these, or in the state, which ``loss-equality`` compares.
    """
    problems = []
    count = 0
    for run in evidence.history.runs:
        count += len(run.commits)
        losses, norms = run.done.said["loss"], run.done.said["grad_norm"]
        if _all_finite(losses) and _all_finite(norms):
            continue
        for rank, loss, norm in zip(run.done.said["rank"], losses, norms, strict=True):
            for name, value in (("loss", loss), ("grad_norm", norm)):
                missing = value is None and name == "loss"
                if missing or (value is not None and not math.isfinite(float(value))):
                    problems.append(f"rank {rank} committed step {run.step} with {name} {value}")
    if not count:
        return unknown("no step was committed")
    refusals = sum(1 for _ in evidence.log.of(Kind.NONFINITE_CAUGHT))
    return verdict_of(problems, f"{count} commits finite, {refusals} refusals")


def _all_finite(values: Sequence[Any]) -> bool:
    """Whether these are finite numbers, found without a look at each alone."""
    return set(map(type, values)) == {float} and all(map(math.isfinite, values))
