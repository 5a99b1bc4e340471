"""A metric's values as a sample: order statistics, and the interval of the median over arms.

Values of one arm are not independent (one slow disk slows all its incidents), so an interval is
over arms, each with its own median: several faults in an arm, or many checkpoints, do not narrow
it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainchaos.chaos.scenario.sla import QUANTILES, samples_needed
from trainchaos.chaos.stats import median_ci95, percentile
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.catalogue import METRICS

_OF_A_RECOVERY = (
    *("recovery_time", "failure_cost", "steps_lost"),
    *("abort_time", "regroup_time", "restore_time", "redo_time"),
)


@dataclass(frozen=True, kw_only=True)
class PossibleValues:
    """How many values a metric of a cell could have. ``values``: incidents or arms, None: not
    counted; ``arms``: planned.
    """

    values: int | None = None
    arms: int | None = None


def chances(
    name: str, arms: Sequence[Sequence[Incident]], planned: int, tried: bool
) -> PossibleValues:
    """Possible values of a metric over ``planned`` repeats; ``arms``: incidents of each repeat that
    left a log.

    A repeat that did not run counts with the largest number of incidents in one that did
    (``tried``: whether the scenario has faults at all). Not counted: rollbacks already counted for
    an earlier incident (``steps_lost`` has one value for each), and checkpoints, as the last one
    pauses nothing. Raises KeyError for an unknown metric.
    """
    per = METRICS[name].per
    if per == "checkpoint":
        return PossibleValues(arms=planned)
    if per == "arm":
        return PossibleValues(values=planned, arms=planned)
    each = [sum(name != "steps_lost" or i.answered_with is None for i in mine) for mine in arms]
    unseen = max(each, default=int(tried)) * (planned - len(arms))
    return PossibleValues(values=sum(each) + unseen, arms=planned)


def why_absent(arms: Sequence[Sequence[Incident]]) -> dict[str, str]:
    """Metric -> why it has no value if it has none although these incidents' faults landed, and
    what to do about it.
    """
    unseen = [one.lost for mine in arms for one in mine if one.steps_lost_unsure == "not known"]
    if unseen:
        return {
            "steps_lost": f"{unseen[0]}: the first step that was reported after the recovery is"
            " beyond those before it; report each step, or with the beacon"
        }
    outcomes = {incident.outcome for mine in arms for incident in mine}
    if outcomes & {"recovered", "degraded"}:
        why = "no step was left to commit after the fault: inject earlier, or raise workload.steps"
    elif outcomes == {"masked"}:
        why = "every fault was masked, nothing had to recover"
    else:
        return {}
    return dict.fromkeys(_OF_A_RECOVERY, why)


def per_arm(
    values: Sequence[float],
    arms: Sequence[int],
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> list[float]:
    """One value per arm, in the order of their first values. ``arms``: the arm of each value; if
    missing (older records lack it), each value counts as a separate arm.
    """
    if len(arms) != len(values):
        return list(values)
    found: dict[int, list[float]] = {}
    for value, arm in zip(values, arms, strict=True):
        found.setdefault(arm, []).append(value)
    return [of(mine) for mine in found.values()]


def summarise(
    name: str,
    values: Sequence[float],
    bound: float = 0.0,
    arms: Sequence[int] | None = None,
    possible: PossibleValues = PossibleValues(),
) -> Metric:
    """One metric's values with order statistics. ``arms``: the repeat of each value; None: one
    value per repeat. Raises KeyError for an unknown metric.
    """
    owners = list(range(len(values))) if arms is None else list(arms)
    each = per_arm(values, owners)
    known = METRICS[name]
    return Metric(
        unit=known.unit,
        values=list(values),
        n=len(values),
        median=statistics.median(values) if values else None,
        min=min(values, default=None),
        max=max(values, default=None),
        ci95=median_ci95(each),
        better=known.better,
        clock_bound=bound,
        arms=owners,
        p95=quantile(each, "p95"),
        p99=quantile(each, "p99"),
        of=possible.values,
        of_arms=possible.arms,
    )


def quantile(values: Sequence[float], name: str) -> float | None:
    """``p90``, ``p95`` or ``p99`` as an order statistic; None below 29, 59 or 299 values, where the
    largest value seen may well be below the quantile (Wilks 1941). Raises KeyError for another
    name.
    """
    share = QUANTILES[name]
    return percentile(values, share) if len(values) >= samples_needed(name) else None
