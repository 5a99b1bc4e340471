"""Summarizes trials: a stack under a family, a stack against the reference, and a stack while
nothing fails. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from trainchaos.chaos.stats import clopper_pearson, median_ci95
from trainchaos.harness.compare.result.model import (
    OUTCOMES,
    SAYS_NOTHING,
    CellSummary,
    FaultFreeSummary,
    OutcomeClass,
    Ratio,
    Trial,
)
from trainchaos.harness.compare.result.statistics import (
    EVERY,
    outliers,
    paired_ratio,
    repetitions_needed,
)
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.cost import failure_cost
from trainchaos.harness.judge.measure.reliability import false_alarms
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.results import Survival

METRICS: tuple[Literal["recovery", "step_time", "goodput"], ...] = (
    "recovery",
    "step_time",
    "goodput",
)


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
    cells = []
    for label in labels:
        for family in families:
            mine = [trial for trial in trials if (trial.label, trial.family) == (label, family)]
            why = not_offered.get((label, family))
            if mine:
                cells.append(_cell(label, family, mine, steps))
            elif why is not None:
                empty = {"worst": "not offered", "witness": why, "note": why}
                cells.append(CellSummary(label=label, family=family, **empty))
    return cells


def worst_of(outcomes: Iterable[OutcomeClass]) -> OutcomeClass:
    """The worst outcome; outcomes that prove nothing count only if there is nothing else."""
    known = list(outcomes)
    return max([one for one in known if one not in SAYS_NOTHING] or known, key=list(OUTCOMES).index)


def _cell(
    label: str,
    family: str,
    trials: Sequence[Trial],
    bare_steps: Mapping[tuple[int, str], float | None],
) -> CellSummary:
    landed = [trial for trial in trials if trial.outcome not in SAYS_NOTHING]
    outcomes = Counter(trial.outcome for trial in trials)
    worst = worst_of(outcomes)
    phases: dict[str, list[float]] = defaultdict(list)
    for span in (span for trial in landed for span in trial.phases):
        phases[span.name].append(span.seconds)
    bare = [bare_steps.get((trial.seed, trial.family)) for trial in trials]
    overhead = [
        trial.step_time / step if trial.step_time and step else None
        for trial, step in zip(trials, bare, strict=True)
    ]
    recovery = {trial.seed: trial.recovery for trial in landed if trial.recovery is not None}
    notes = dict.fromkeys(trial.note for trial in trials if trial.note)
    if outcomes["masked"] and recovery:
        notes[
            f"in {outcomes['masked']} of {len(landed)} training did not stand still, which gives"
            " no recovery time"
        ] = None
    costs = [failure_cost(trial.ranks, trial.recovery) for trial in landed]
    seconds = ("recovery", "detection", "full_rate", "redundancy")
    lost = [math.inf if t.recovery == math.inf else float(t.steps_lost) for t in landed]
    return CellSummary(
        label=label,
        family=family,
        n=len(landed),
        outcomes=dict(outcomes),
        worst=worst,
        witness=next(trial.witness for trial in trials if trial.outcome == worst),
        **{name: _metric("s", [getattr(t, name) for t in landed]) for name in seconds},
        goodput=_metric("ratio", [t.goodput for t in landed], "higher"),
        ettr=_metric("ratio", [t.ettr for t in landed], "higher"),
        survival=survival_of(landed),
        steps_lost=_metric("steps", lost),
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
    kept = sum(OUTCOMES[trial.outcome].kept for trial in landed)
    low, high = clopper_pearson(kept, len(landed))
    return Survival(
        arms=len(landed), survived=kept, probability=kept / len(landed), low=low, high=high
    )


def _metric(
    unit: str, values: Sequence[float | None], better: Literal["lower", "higher"] = "lower"
) -> Metric | None:
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
        better=better,
        of=len(values),
        of_arms=len(values),
    )


def ratios_of(
    trials: Sequence[Trial],
    reference: str,
    *,
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
    ratios = []
    for label in labels:
        for family, metric in kinds:
            other = (against or {}).get(label, reference)
            pooled = together if family == EVERY else [family]
            ours, theirs = (_values(landed, one, pooled, metric) for one in (other, label))
            pairs = len(ours.keys() & theirs.keys())
            if not pairs:
                continue
            value, interval, says = paired_ratio(ours, theirs, higher_is_better=metric == "goodput")
            unsettled = says in ("no difference shown", "too few")
            ratio = Ratio(
                label=label,
                against=other,
                family=family,
                metric=metric,
                n=pairs,
                value=value,
                interval=interval,
                says=says,
                needed=repetitions_needed(ours, theirs) if unsettled else None,
            )
            ratios.append(ratio)
    return ratios


def _values(
    trials: Sequence[Trial], label: str, families: Sequence[str], metric: str
) -> dict[int, float]:
    """A number for each seed and family -> value."""
    return {
        trial.seed * len(families) + families.index(trial.family): value
        for trial in trials
        if trial.label == label
        and trial.family in families
        and (value := getattr(trial, metric)) is not None
    }


def at_rest(
    label: str, controls: Sequence[History], faulted: Sequence[History], beside: int
) -> FaultFreeSummary | None:
    """Idle spares and false alarms of a stack while no fault acts, from all its arms. ``beside``:
    provisioned processes besides the ranks. None: no arm can be read.
    """
    known = [*controls, *faulted]
    if not known:
        return None
    ranks = max(history.info.ranks for history in known)
    spares = max(history.info.spares for history in known) + beside
    return FaultFreeSummary(
        label=label,
        ranks=ranks,
        spares=spares,
        share=spares / (ranks + spares),
        false_alarms=false_alarms(controls, faulted),
    )
