"""From findings and values to a verdict: SLA clauses, the three-valued merge, exit codes, and the
one-line reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Literal

from trainchaos.chaos import errors
from trainchaos.chaos.scenario.model import Cell, SlaCheck
from trainchaos.chaos.scenario.sla import Clause, evaluate, parse_clause, samples_needed
from trainchaos.chaos.stats import median_ci95
from trainchaos.chaos.units import counted, interval, with_unit
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.pressure import TOO_BUSY
from trainchaos.harness.judge.measure.samples import per_arm
from trainchaos.harness.judge.results import (
    CellResult,
    Finding,
    SlaResult,
    Verdict,
    beside,
    error_in_steps,
    in_steps,
    merge,
)

RunVerdict = Literal[
    "pass", "fail", "inconclusive", "skipped", "interrupted", "halted", "broken", "unsafe"
]
ROOTS = ("progress", "fault-landed", "evidence-complete")
"""Checkers whose findings explain those of others."""
EXIT_CODES: Mapping[str, int] = MappingProxyType(
    {
        "pass": errors.EXIT_PASS,
        "fail": errors.EXIT_FAIL,
        "inconclusive": errors.EXIT_INCONCLUSIVE,
        "broken": errors.EXIT_HARNESS,
        "unsafe": errors.EXIT_UNSAFE,
        "halted": errors.EXIT_HALTED,
        "skipped": errors.EXIT_SKIPPED,
        "interrupted": errors.EXIT_INTERRUPTED,
    }
)


_ENDED: Mapping[RunVerdict, str] = MappingProxyType(
    {
        "interrupted": "interrupted",
        "broken": "the harness or the machine failed",
        "halted": "a stop condition held",
    }
)
"""How an arm may end that decides the run, the first one first."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A verdict, its exit code and the line that explains it."""

    verdict: RunVerdict
    exit_code: int
    reason: str


def judge_slas(
    cell: Cell,
    metrics: Mapping[str, Metric],
    lines: Mapping[str, Sequence[int]],
    missing: str,
    absent: Mapping[str, str] = MappingProxyType({}),
    steps: Mapping[int, float] = MappingProxyType({}),
) -> list[SlaResult]:
    """Judge every SLA clause of a cell. ``missing``: why any metric may have no value, if known;
    ``absent``: metric -> why it has none, where ``missing`` says nothing; ``steps``: repeat ->
    seconds of a step of its control arm, if it has one.
    """
    return [
        judge_sla(cell.id, name, check, metrics[name], line, why, steps=steps)
        for name, checks in cell.scenario.sla.items()
        for why in [missing or absent.get(name, "")]
        for check, line in zip_longest(checks, lines.get(name, ())[: len(checks)])
        if check.covers(cell.scenario.faults)
    ]


def judge_sla(
    cell: str,
    name: str,
    check: SlaCheck,
    metric: Metric,
    line: int | None,
    missing: str,
    *,
    steps: Mapping[int, float] = MappingProxyType({}),
) -> SlaResult:
    """Judge one clause on the arms of a metric. What it implies for future arms is up to
    ``harness.gating``.

    No value, or too few for the aggregate, is inconclusive; so is a margin smaller than the error
    of the values, or a bound in steps where a control arm has none. An infinite value never meets
    a bound.

    Raises ClauseError for a clause that cannot be read.
    """
    clause = parse_clause(check.check, metric.unit)
    values, arms, bound = metric.values, metric.arms, metric.clock_bound
    observed_s: float | None = None
    step_s: list[float | None] = []
    if clause.in_steps and values:
        observed_s = evaluate(clause, values)[1]
        values, arms, step_s, uncounted = in_steps(values, arms, steps)
        if uncounted and math.isfinite(observed_s):
            names = ", ".join(str(arm) for arm in sorted(set(uncounted)))
            missing = (
                f"its unit is a step of the control arm, and that of repeat {names} shows none: run"
                " it again, or bound seconds"
            )
            observed_s, values, arms, step_s = None, [], [], []
        bound = error_in_steps(bound, step_s)
    observed = evaluate(clause, values)[1] if values else None
    if observed is None:
        verdict: Verdict = "inconclusive"
        detail = f"no value: {missing or 'nothing in the log to measure it by'}"
    else:
        count = counted(len(values), metric.of)
        seen = _observed(observed, clause.unit, metric.better, values, arms)
        said = f"observed {seen}{beside(observed_s, step_s, metric.better)}, n={count}"
        verdict, detail = _weighed(clause, values, said, bound, count)
    return SlaResult(
        cell=cell,
        metric=name,
        clause=clause.text,
        severity=check.severity,
        verdict=verdict,
        observed=observed,
        unit=clause.unit,
        values=values,
        detail=detail,
        line=line,
        arms=arms,
        of=metric.of,
        of_arms=metric.of_arms,
        step_s=step_s,
        observed_s=observed_s,
    )


def _weighed(
    clause: Clause, values: Sequence[float], said: str, bound: float, count: str
) -> tuple[Verdict, str]:
    """Verdict and reason for a clause that has values. ``said``: what was observed; ``bound``: the
    error of the values, which moves an aggregate no further.
    """
    holds, observed = evaluate(clause, values)
    need = samples_needed(clause.aggregate)
    if not math.isfinite(observed):
        never = sum(map(math.isinf, values))
        return "fail", f"{said} ({never} of {len(values)} never recovered)"
    if len(values) < need:
        return "inconclusive", f"{clause.aggregate} needs {need} values, there are {count}"
    moved = {evaluate(clause, [value + by for value in values])[0] for by in (-bound, bound)}
    if bound and moved != {holds}:
        blur = quantity(bound, clause.unit)
        why = f"{said}, but clocks of several machines blur it by {blur}, so it is undecided"
        return "inconclusive", why
    return ("pass" if holds else "fail"), said


def quantity(value: float | None, unit: str, better: str = "neither") -> str:
    """A value as text, rounded conservatively: ``0.831 s``, ``2 steps``, ``infinite``."""
    if value is None:
        return "none"
    return "infinite" if not math.isfinite(value) else with_unit(value, unit, better)


def _observed(
    value: float, unit: str, better: str, values: Sequence[float], arms: Sequence[int]
) -> str:
    between = interval(median_ci95(per_arm(values, arms)))
    return f"{quantity(value, unit, better)}{' ' if between else ''}{between}"


def judge_cell(
    cell: str,
    slas: Sequence[SlaResult],
    invariants: Mapping[str, Finding],
    ran: int,
    planned: int,
    source: str,
    *,
    untried: str = "",
    unread: str = "",
) -> tuple[Verdict, str]:
    """Verdict and reason of a cell. A ``warn`` clause never fails; an arm that did not run makes it
    inconclusive.

    ``untried``: why nothing was tested, or ""; such a cell does not pass. ``unread``: why the log
    of an arm was not read.
    """
    hard = [sla for sla in slas if sla.severity == "fail"]
    verdicts = [sla.verdict for sla in hard] + [finding.verdict for finding in invariants.values()]
    lacking = ran < planned
    verdict = merge([*verdicts, "inconclusive"] if lacking else verdicts)
    if verdict == "pass" and untried:
        return "inconclusive", untried
    if not verdicts and not lacking:
        return "inconclusive", "nothing was checked: no invariant, and no SLA that may fail"
    if verdict == "pass":
        return verdict, f"{len(hard)} SLAs, {len(invariants)} invariants"
    # causes before consequences: a fault that never fired or a torn log leaves others open as well
    named = sorted(invariants.items(), key=lambda item: item[0] not in ROOTS)
    deciding = [(name, found.witness) for name, found in named if found.verdict == verdict]
    if "progress" in dict(deciding):
        # no step of the command was seen: everything else follows from that
        return verdict, dict(deciding)["progress"]
    if verdict == "inconclusive" and not lacking and (crowded := _too_busy(deciding)):
        return verdict, crowded
    for sla in hard:
        if sla.verdict == verdict:
            return verdict, sla_line(sla, source)
    if deciding and not (verdict == "inconclusive" and lacking):
        return verdict, ": ".join(deciding[0])
    return verdict, unread or f"{ran} of {planned} arms ran: {cell} cannot be judged; run it again"


def _too_busy(deciding: Sequence[tuple[str, str]]) -> str:
    """Reason that names an open finding which a quieter machine would decide; "" if there is none,
    or if the root cause lies elsewhere.
    """
    for name, witness in deciding:
        where, said, why = witness.partition(TOO_BUSY)
        if said and not any(root in ROOTS for root, _ in deciding):
            return f"{TOO_BUSY}{name}: {where}{why}"
    return ""


def sla_line(sla: SlaResult, source: str) -> str:
    """One line that names the clause and the number: ``file.yaml:14 recovery_time median < 0.5s
    observed 0.83 s, n=5``.
    """
    place = f"{source.rsplit('/', 1)[-1]}:{sla.line}  " if sla.line else ""
    return f"{place}{sla.metric}  {sla.clause}   {sla.detail}"


def judge_run(
    cells: Sequence[CellResult],
    slas: Sequence[SlaResult],
    outcomes: Mapping[str, tuple[str, str]],
    unsafe: Sequence[str],
    landed: tuple[int, int],
    skipped: Sequence[str],
) -> Gate:
    """The verdict of a run. Unsafe beats all others, then interrupted, broken, halted, fail,
    inconclusive, pass.

    ``outcomes``: arm -> how it ended and why, if it logged an end; ``landed``: faults landed and
    healed, faults fired; ``skipped``: one line per cell that lacked a capability. Without any cell,
    nothing ran.
    """
    if unsafe:
        return _gate("unsafe", f"left behind or not healed: {unsafe[0]}")
    failing = next((f" (and: {cell.reason})" for cell in cells if cell.verdict == "fail"), "")
    for verdict, words in _ENDED.items():
        arms = [f"{arm}: {why}" for arm, (ended, why) in outcomes.items() if ended == verdict]
        if arms:
            gate = _gate(verdict, f"{words} in {arms[0]}{failing}")
            terminated = (verdict, "SIGTERM") in outcomes.values()
            return replace(gate, exit_code=errors.EXIT_TERMINATED) if terminated else gate
    if not cells:
        return _gate("skipped", skipped[0] if skipped else "nothing ran")
    merged = merge([cell.verdict for cell in cells])
    if merged != "pass":
        rows = [cell for cell in cells if cell.verdict == merged]
        return _gate(merged, _of_worst(rows, alone=len(cells) == 1))
    hard = [sla for sla in slas if sla.severity == "fail"]
    checked = [finding for cell in cells for finding in cell.invariants.values()]
    aside = f"; skipped: {'; '.join(skipped)}" if skipped else ""
    return _gate(
        "pass",
        f"{len(hard)} of {len(hard)} SLAs, {len(checked)} of {len(checked)} invariants, "
        f"{landed[0]} of {landed[1]} faults landed and healed{aside}",
    )


def _of_worst(rows: Sequence[CellResult], *, alone: bool) -> str:
    """Reason of the one of ``rows``, cells of the same verdict, that says most. It begins with
    ``TOO_BUSY`` if a quieter machine would decide all of them.
    """

    def tells_less(cell: CellResult) -> tuple[bool, bool]:
        # a command that cannot be observed in one cell is not played in others: that one says why
        seen = cell.invariants.get("progress")
        observed = seen is None or seen.verdict != cell.verdict
        return observed, cell.reason.startswith(TOO_BUSY)

    worst = min(rows, key=tells_less)
    busy = TOO_BUSY if worst.reason.startswith(TOO_BUSY) else ""
    name = "" if alone else f"{worst.id}: "
    return busy + name + worst.reason.removeprefix(busy)


def _gate(verdict: RunVerdict, reason: str) -> Gate:
    return Gate(verdict=verdict, exit_code=EXIT_CODES[verdict], reason=reason)
