"""``chaos compare --tune STACK``: finds the combination of a stack's documented options that
recovers fastest. Pure.

The candidates are all combinations of the stack's ``grid``; each runs under every family with seeds
that no comparison uses. They are ranked by the number of lost jobs, then by the geometric mean over
families of the median recovery time, so that no family counts more because its times are longer.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.compare.environments.stack import Stack, Value
from trainchaos.harness.compare.environments.tuned import Sweep, TriedOptions
from trainchaos.harness.compare.plan.directory import ComparisonPlan
from trainchaos.harness.compare.plan.plan import Entrant
from trainchaos.harness.compare.result.model import FOR_EVER, SAYS_NOTHING, Trial

FIRST_SEED = 9001
"""First seed of a sweep; those of a comparison begin at 1."""
MOST = 64
SHORTEST_S = 1e-3  # a time of zero would win whatever the other families' times are


def candidates(name: str, kind: type[Stack]) -> list[Entrant]:
    """One entrant for each combination of the stack's grid. Raises ScenarioError when there is
    nothing to sweep.
    """
    if not kind.grid:
        raise ScenarioError(
            f"--tune {name}: it has no options to sweep",
            hint="a stack's `grid` names them (harness/stacks)",
        )
    made = [
        dict(zip(kind.grid, values, strict=True))
        for values in itertools.product(*kind.grid.values())
    ]
    if len(made) > MOST:
        raise ScenarioError(
            f"--tune {name}: {len(made)} combinations", hint=f"at most {MOST}: try fewer values"
        )
    stacks = [kind("tuned", values=values) for values in made]
    return [
        Entrant(label=f"{name} try {number:02}", name=name, settings="tuned", stack=stack)
        for number, stack in enumerate(stacks, start=1)
    ]


def sweep_of(
    plan: ComparisonPlan, trials: Sequence[Trial], kind: type[Stack], finished: str
) -> Sweep:
    """Result of a finished sweep's trials. Raises ScenarioError if no candidate survived every
    family.
    """
    tried = []
    for entrant in candidates(plan.tune, kind):
        mine = [trial for trial in trials if trial.label == entrant.label]
        tried.append(_tried(plan, sorted(mine, key=lambda one: one.seed), entrant.stack.values))
    best = min(tried, key=lambda one: (math.isinf(one.score), one.lost, one.score))
    if math.isinf(best.score):
        raise ScenarioError(
            f"--tune {plan.tune}: none of {len(tried)} combinations survived every family",
            hint="the report of the sweep has the witness of each",
        )
    cores, processor = (plan.provenance.get(name, "unknown") for name in ("cores", "processor"))
    return Sweep(
        stack=plan.tune,
        made=finished,
        commit=str(plan.provenance.get("commit") or ""),
        machine=f"{cores} cores, {processor}",
        versions=plan.stacks[0].versions,
        families=[family.name for family in plan.families],
        seeds=plan.seeds,
        grid={name: list(values) for name, values in kind.grid.items()},
        tried=tried,
        best=best.values,
    )


def _tried(
    plan: ComparisonPlan, trials: Sequence[Trial], values: Mapping[str, Value]
) -> TriedOptions:
    known = {f.name: [one for one in trials if one.family == f.name] for f in plan.families}
    times = {name: [_time(one) for one in mine] for name, mine in known.items()}
    finite = sum(math.isfinite(time) for mine in times.values() for time in mine)
    return TriedOptions(
        values=dict(values),
        outcomes={name: [one.outcome for one in mine] for name, mine in known.items()},
        recovery=times,
        score=score(list(times.values())),
        lost=len(plan.seeds) * len(plan.families) - finite,
    )


def score(times: Sequence[Sequence[float]]) -> float:
    """Geometric mean over families of the median recovery time in seconds, over surviving trials;
    infinite if a family has none.
    """
    known = [[time for time in mine if math.isfinite(time)] for mine in times]
    if not known or not all(known):
        return math.inf
    return statistics.geometric_mean(max(statistics.median(mine), SHORTEST_S) for mine in known)


def _time(trial: Trial) -> float:
    if trial.outcome in FOR_EVER | SAYS_NOTHING:
        return math.inf
    return 0.0 if trial.recovery is None else trial.recovery
