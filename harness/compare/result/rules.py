"""Checks those rules of the closed division (docs/benchmark-rules.md) that a program can check,
before and after playing.

Each function returns broken rules in words. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.plan.directory import ComparisonPlan, PlayedArm
from trainchaos.harness.compare.plan.plan import Family
from trainchaos.harness.compare.result.model import Ratio
from trainchaos.harness.compare.result.statistics import LEAST_PAIRS
from trainchaos.harness.host import dns_check

SHIPPED = HOME / "scenarios" / "compare"
BUSY = 0.1
"""Share of the processors that other programs may use."""
EQUAL = ("no difference shown", "neither recovers")


def broken(plan: ComparisonPlan, families: Sequence[Family], shipped: Path = SHIPPED) -> list[str]:
    """Rules broken by a plan, before anything is played."""
    found = [
        f"{family.planned.path} is not one of scenarios/compare"
        for family in families
        if Path(family.planned.path).resolve().parent != shipped.resolve()
    ]
    if len(plan.seeds) < LEAST_PAIRS:
        found.append(
            f"{len(plan.seeds)} seeds: below {LEAST_PAIRS} no interval exists (--repeat"
            f" {LEAST_PAIRS})"
        )
    if not plan.same:
        found.append("the reference is not played twice (--same)")
    commit = str(plan.provenance.get("commit") or "")
    if not commit or commit.endswith("+"):
        found.append(
            "the code has no commit"
            if not commit
            else f"files differ from the commit {commit[:9]}: commit them"
        )
    if dns_check.caution(plan.provenance.get("slowest_lookup_s", 0.0)):
        found.append(f"the name server is slow: {dns_check.REMEDY}")
    return found


def broken_by(
    plan: ComparisonPlan,
    played: Iterable[PlayedArm],
    same: Sequence[Ratio],
    missing: int,
    refuted: Sequence[str] = (),
) -> list[str]:
    """Rules broken by the arms played. ``refuted``: arms whose record is not credible."""
    found = [f"{missing} arms of the plan were not played"] if missing else []
    found += refuted
    found += plan.changes
    arms = list(played)
    noisy = [one for one in arms if one.busy is None or one.busy > BUSY]
    if noisy:
        most = max((one.busy for one in noisy if one.busy is not None), default=None)
        share = "share not known" if most is None else f"up to {most:.0%} of the processors"
        found.append(f"other programs ran before {len(noisy)} of {len(arms)} arms ({share})")
    found += [
        f"the reference differs from itself in {one.family}: {one.says}"
        for one in same
        if one.metric == "recovery" and one.says not in EQUAL
    ]
    return found
