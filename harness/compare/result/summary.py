"""Summarizes trials: a stack under a family, and a stack against the reference. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args

from trainchaos.chaos.stats import clopper_pearson, median_ci95
from trainchaos.harness.compare.result.model import CellSummary, OutcomeClass, Ratio, Trial
from trainchaos.harness.compare.result.statistics import (
    EVERY,
    outliers,
    paired_ratio,
    repetitions_needed,
)
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.cost import failure_cost
from trainchaos.harness.judge.results import Survival

FROM_BEST: tuple[OutcomeClass, ...] = get_args(OutcomeClass)
"""Classes from best to worst. A fault that did not land proves nothing, so that class is shown only
if nothing else happened.
"""
SURVIVED = ("masked", "recovered", "rolled back", "degraded")
"""The job finished and kept its work."""
SAYS_NOTHING = ("not landed", "not offered", "refuted")
METRICS: tuple[Literal["recovery", "step_time", "goodput"], ...] = (
    "recovery",
    "step_time",
    "goodput",
)
RATIOS: Mapping[str, Callable[[Trial], float | None]] = {
    "recovery": lambda trial: trial.recovery,
    "step_time": lambda trial: trial.step_time,
    "goodput": lambda trial: trial.goodput,
}


def cells_of(
    labels: Sequence[str],
    families: Sequence[str],
    trials: Sequence[Trial],
    *,
    bare: str | None,
    not_offered: Mapping[tuple[str, str], str],
) -> list[CellSummary]:
    """Every stack under every family with results. ``bare``: label of the stack whose fault-free
    step is the reference for the others'; ``not_offered``: (label, family) -> reason.
    """
    steps = {(t.seed, t.family): t.step_time for t in trials if t.label == bare and t.step_time}
    found = []
    for label in labels:
        for family in families:
            mine = [trial for trial in trials if (trial.label, trial.family) == (label, family)]
            if mine:
                found.append(_cell(label, family, mine, steps))
            elif (label, family) in not_offered:
                why = not_offered[label, family]
                empty = CellSummary(
                    label=label, family=family, worst="not offered", witness=why, note=why
                )
                found.append(empty)
    return found


def worst_of(outcomes: Iterable[OutcomeClass]) -> OutcomeClass:
    """The worst outcome; outcomes that prove nothing count only if there is nothing else."""
    known = list(outcomes)
    return max([one for one in known if one not in SAYS_NOTHING] or known, key=FROM_BEST.index)


def _cell(
    label: str,
    family: str,
    trials: Sequence[Trial],
    bare_steps: Mapping[tuple[int, str], float | None],
) -> CellSummary:
    landed = [trial for trial in trials if trial.outcome not in SAYS_NOTHING]
    outcomes = Counter(trial.outcome for trial in trials)
    worst = worst_of(trial.outcome for trial in trials)
    phases: dict[str, list[float]] = defaultdict(list)
    for trial in landed:
        for span in trial.phases:
            phases[span.name].append(span.seconds)
    overhead = [
        (
            trial.step_time / bare
            if trial.step_time and (bare := bare_steps.get((trial.seed, trial.family)))
            else None
        )
        for trial in trials
    ]
    recovery = {trial.seed: trial.recovery for trial in landed if trial.recovery is not None}
    masked = outcomes["masked"]
    notes = dict.fromkeys(trial.note for trial in trials if trial.note)
    if masked and recovery:
        notes[
            f"in {masked} of {len(landed)} training did not stand still, which gives no recovery"
            " time"
        ] = None
    costs = [failure_cost(trial.ranks, trial.recovery) for trial in landed]
    return CellSummary(
        label=label,
        family=family,
        n=len(landed),
        outcomes=dict(outcomes),
        worst=worst,
        witness=next(trial.witness for trial in trials if trial.outcome == worst),
        recovery=_metric("s", [t.recovery for t in landed]),
        detection=_metric("s", [t.detection for t in landed]),
        full_rate=_metric("s", [t.full_rate for t in landed]),
        redundancy=_metric("s", [t.redundancy for t in landed]),
        goodput=_metric("ratio", [t.goodput for t in landed], "higher"),
        ettr=_metric("ratio", [t.ettr for t in landed], "higher"),
        survival=survival_of(landed),
        steps_lost=_metric("steps", [_steps_lost(t) for t in landed]),
        samples_lost=_metric("samples", [t.samples_lost for t in landed]),
        overhead=_metric("ratio", overhead),
        phases={name: statistics.median(v) for name, v in phases.items()},
        outliers=outliers(recovery),
        cost_gpu_hours=statistics.median(costs) if costs else None,
        note="; ".join(notes),
    )


def survival_of(landed: Sequence[Trial]) -> Survival | None:
    """Number of trials, of those whose fault landed, that kept the job's work to the end, with the
    exact interval; None: no such trial.
    """
    if not landed:
        return None
    kept = sum(trial.outcome in SURVIVED for trial in landed)
    low, high = clopper_pearson(kept, len(landed))
    return Survival(
        arms=len(landed), survived=kept, probability=kept / len(landed), low=low, high=high
    )


def _steps_lost(trial: Trial) -> float:
    return math.inf if trial.recovery == math.inf else float(trial.steps_lost)


def _metric(unit: str, values: Sequence[float | None], better: str = "lower") -> Metric | None:
    """A metric over trials, some of which may have no value; None if none has."""
    present = [float(value) for value in values if value is not None]
    if not present:
        return None
    return Metric(
        unit=unit,
        values=present,
        n=len(present),
        median=statistics.median(present),
        min=min(present),
        max=max(present),
        ci95=median_ci95(present),
        better="higher" if better == "higher" else "lower",
        of=len(values),
        of_arms=len(values),
    )


def ratios_of(
    trials: Sequence[Trial],
    reference: str,
    *,
    seed: int,
    against: Mapping[str, str] | None = None,
    apart: Collection[str] = (),
) -> list[Ratio]:
    """Every stack against the reference, or against the stack that ``against`` names for its label,
    by pairs of the same seed; for recovery also over all families together, except those in
    ``apart``.

    A trial whose fault did not land does not form a pair. Step times and goodput of families share
    controls, so their pairs are not independent and are not pooled.
    """
    landed = [trial for trial in trials if trial.outcome not in SAYS_NOTHING]
    labels = [label for label in dict.fromkeys(t.label for t in landed) if label != reference]
    families = list(dict.fromkeys(trial.family for trial in landed))
    kinds = [(family, metric) for family in families for metric in METRICS]
    together = [family for family in families if family not in apart]
    kinds += [(EVERY, METRICS[0])] if len(together) > 1 else []
    pooled = [trial for trial in landed if trial.family in together]
    found = []
    for label in labels:
        for family, metric in kinds:
            value = RATIOS[metric]
            other = (against or {}).get(label, reference)
            known = pooled if family == EVERY else landed
            ours, theirs = (_values(known, one, family, value) for one in (other, label))
            pairs = len(ours.keys() & theirs.keys())
            if not pairs:
                continue
            middle, interval, says = paired_ratio(
                ours, theirs, seed=seed, higher_is_better=metric == "goodput"
            )
            unsettled = says in ("no difference shown", "too few")
            ratio = Ratio(
                label=label,
                against=other,
                family=family,
                metric=metric,
                n=pairs,
                value=middle,
                interval=interval,
                says=says,
                needed=repetitions_needed(ours, theirs) if unsettled else None,
            )
            found.append(ratio)
    return found


def _values(
    trials: Sequence[Trial], label: str, family: str, value: Callable[[Trial], float | None]
) -> dict[int, float]:
    """Seed -> value; over all families, a separate number for each family and seed."""
    place = {name: index for index, name in enumerate(sorted({trial.family for trial in trials}))}
    mine = (trial for trial in trials if trial.label == label and family in (EVERY, trial.family))
    return {
        trial.seed if family != EVERY else trial.seed * len(place) + place[trial.family]: number
        for trial in mine
        if (number := value(trial)) is not None
    }
