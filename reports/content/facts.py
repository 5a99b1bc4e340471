"""Facts that all reports state in the same words: tallies, the strategy comparison, recovery time
by phase.
"""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos import plugins
from trainchaos.chaos.units import MISSING, number, pairs, plural
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import PHASE_NAMES, Incident
from trainchaos.harness.judge.results import ArmResult, CellResult, Results, SlaResult
from trainchaos.reports.content.figures import labels, median_of


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """One line of the comparison of strategies; ``note`` names a cost that the numbers alone do not
    show; ``at_most``: the lost steps of an incident are not known more exactly.
    """

    cell: CellResult
    label: str
    badput_s: float | None
    provisioned: int | None
    never: int
    note: str
    at_most: bool = False

    def metric(self, name: str, *, unit: bool = False, alone: bool = True) -> str:
        """The median of a metric; of lost steps as a bound where that of an incident is one."""
        text = median_of(self.cell.metrics.get(name), unit=unit, alone=alone)
        bound = name == "steps_lost" and self.at_most and text != MISSING
        return f"≤ {text}" if bound else text


def degraded(results: Results) -> list[str]:
    """One line for each incident after which a command continued with fewer ranks to its end, which
    is not a recovery.
    """
    return [
        f"{i.fault} in {i.cell}, repeat {i.repeat}: {i.evidence['ranks']}"
        for i in results.faults
        if i.outcome == "degraded" and "ranks" in i.evidence
    ]


def busy(results: Results) -> list[str]:
    """What other programs used of the machine as the run began, and in its arms, if it was much."""
    said = results.system.get("busy")
    lines = [said] if isinstance(said, str) and said else []
    noisy = [arm for arm in results.arms if arm.others is not None]
    if noisy:
        worst = max(noisy, key=lambda arm: arm.others or 0.0)
        lines.append(
            f"other programs used much of the machine in {len(noisy)} of {len(results.arms)} arms,"
            f" at most {worst.others:.1f} cores in {worst.id}: their times are those of a busy"
            " machine"
        )
    return lines


def strategies(results: Results) -> list[StrategyFacts]:
    """One entry per cell, in the order of the results."""
    names = labels(results)
    return [_strategy(results, cell, names[cell.id]) for cell in results.cells]


def _strategy(results: Results, cell: CellResult, label: str) -> StrategyFacts:
    faulted = arms_of(results, cell.id, "faulted")
    ranks = max((arm.provisioned_ranks for arm in faulted), default=None)
    waiting = any(arm.badput.get("spare_idle", 0.0) > 0 for arm in faulted)
    badput = [sum(arm.badput.values()) for arm in faulted]
    return StrategyFacts(
        cell=cell,
        label=label,
        badput_s=statistics.median(badput) if badput else None,
        provisioned=ranks,
        at_most=any(i.steps_lost_unsure == "at most" for i in incidents_of(results, cell.id)),
        never=sum(i.recovery_time == float("inf") for i in incidents_of(results, cell.id)),
        note="spares count as provisioned: the time they wait lowers goodput" if waiting else "",
    )


def arms_of(results: Results, cell: str, kind: str) -> list[ArmResult]:
    """The arms of one cell and kind, by repeat."""
    return sorted(
        (a for a in results.arms if a.cell == cell and a.arm == kind), key=lambda a: a.repeat
    )


def incidents_of(results: Results, cell: str) -> list[Incident]:
    """The incidents of one cell."""
    return [i for i in results.faults if i.cell == cell]


def struck(results: Results, arm: ArmResult) -> list[Incident]:
    """The incidents of an arm that were injected; a control arm has none by definition."""
    if arm.arm != "faulted":
        return []
    return [i for i in results.faults if (i.cell, i.repeat) == (arm.cell, arm.repeat) and i.fired]


def median_incident(results: Results, cell: str) -> Incident | None:
    """The incident with the (upper) median recovery time: a real one, so its phases add up."""
    timed = [
        (i.recovery_time, n, i)
        for n, i in enumerate(incidents_of(results, cell))
        if i.recovery_time is not None
    ]
    return sorted(timed, key=lambda item: item[:2])[len(timed) // 2][2] if timed else None


def phase_medians(incidents: Iterable[Incident]) -> dict[str, float]:
    """Median seconds of each recovery phase over the incidents that have it, in the order of the
    phases.
    """
    seconds: dict[str, list[float]] = {name: [] for name in PHASE_NAMES}
    for incident in incidents:
        for phase in incident.phases:
            seconds.setdefault(phase.name, []).append(phase.seconds)
    return {name: statistics.median(values) for name, values in seconds.items() if values}


def went(results: Results, sla: SlaResult, better: str = "neither") -> str:
    """Where the time of a clause about a time went: medians of the phases in seconds."""
    phases = phase_medians(incidents_of(results, sla.cell)) if sla.timed else {}
    return " · ".join(f"{name} {number(seconds, better)}" for name, seconds in phases.items())


def tallies(results: Results) -> list[str]:
    """Counts of what held: ``4 of 5 SLAs``, invariants, and faults landed and healed; and of the
    arrivals of a fault, how many fired of those that were due in all arms.
    """
    invariants = [f for cell in results.cells for f in cell.invariants.values()]
    parts = []
    if results.slas:
        parts.append(_of((s.verdict == "pass" for s in results.slas), "SLA"))
    if invariants:
        parts.append(_of((f.verdict == "pass" for f in invariants), "invariant"))
    if results.faults:
        parts.append(
            _of((i.landed and i.healed for i in results.faults), "fault") + " landed and healed"
        )
    for name in dict.fromkeys(name for arm in results.arms for name in arm.arrivals):
        mine = [arm.arrivals[name] for arm in results.arms if name in arm.arrivals]
        fired, due = sum(one.fired for one in mine), sum(one.due for one in mine)
        parts.append(f"{fired} of {plural(due, 'arrival')} of {name} fired")
    return parts


def _of(held: Iterable[bool], noun: str) -> str:
    values = list(held)
    return f"{sum(values)} of {plural(len(values), noun)}"


def failing_slas(results: Results) -> list[SlaResult]:
    """Clauses that failed and whose severity is fail."""
    return [s for s in results.slas if s.verdict == "fail" and s.severity == "fail"]


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node over all arms. ``processes``: from the first arm with it; ``lost``: arm and reason;
    ``clock_bound_s``: the largest.
    """

    number: int
    host: str
    address: str
    devices: str
    processes: str
    lost: tuple[str, ...]
    clock_bound_s: float


def nodes(results: Results) -> list[NodeFacts]:
    """Every machine that was a node of an arm, by number; a node held by two machines in turn has
    two rows.
    """
    found: dict[tuple[int, str, str], NodeFacts] = {}
    for arm in results.arms:
        for one in arm.nodes:
            key = (one.node, one.host, one.address)
            known = found.get(key)
            lost = tuple(f"{arm.id} {why}" for why in one.lost)
            found[key] = NodeFacts(
                number=one.node,
                host=one.host,
                address=one.address,
                devices=", ".join(one.devices),
                processes=known.processes if known else ", ".join(one.processes),
                lost=(*(known.lost if known else ()), *lost),
                clock_bound_s=max(one.clock_bound_s, known.clock_bound_s if known else 0.0),
            )
    return [found[key] for key in sorted(found)]


def where(results: Results, incident: Incident) -> str:
    """``node 1 (gpu07)``, of an incident; empty where there are no nodes, or too many to name."""
    hosts = {
        one.node: one.host
        for arm in results.arms
        for one in arm.nodes
        if (arm.cell, arm.repeat, arm.arm) == (incident.cell, incident.repeat, "faulted")
    }
    known = [number for number in incident.nodes if number in hosts]
    return (
        ", ".join(f"node {number} ({hosts[number]})" for number in known) if len(known) <= 4 else ""
    )


def target_of(target: dict[str, Any]) -> str:
    """What a fault acts on: ``rank 1 · process w1``; a dash where nothing was hit."""
    named = {key: value for key, value in target.items() if value not in (None, "", [], {})}
    return pairs(named) or MISSING


def place(results: Results, sla: SlaResult) -> str:
    """``scenario.yaml:14``: where the clause is written."""
    name = Path(results.source).name
    return f"{name}:{sla.line}" if sla.line is not None else name


def shown_path(path: Path) -> str:
    """A path as a person would type it: relative when it lies below the current directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def latest_or_own(run: RunDirectory) -> Path:
    """``…/latest`` when it points at this run, else the run's own directory."""
    link = run.root.parent / "latest"
    return link if link.is_symlink() and link.resolve() == run.root.resolve() else run.root


def analyze_command(run: RunDirectory, results: Results) -> str:
    """The command that judges the stored run again, with the plugins that it was played with."""
    words = ["chaos", "analyze", shown_path(run.root)]
    for place in plugins.named_in(results.reproduce):
        words += [plugins.OPTION, place]
    return shlex.join(words)
