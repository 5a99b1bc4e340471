"""The CI gate: red only if a confidence bound has crossed its limit, so that chance alone fails at
most one run in twenty; green only if a bound shows that the limit holds; otherwise inconclusive,
with the number of repeats that would settle it. A bound that needs more arms than there are does
not count. ``docs/ci.md`` has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from trainchaos.chaos.files import write_json
from trainchaos.chaos.stats import LEVEL
from trainchaos.chaos.units import COUNT_UNITS, plural
from trainchaos.harness.gating.baseline import Baseline
from trainchaos.harness.gating.clauses import ClauseDecision, decide, is_statistical
from trainchaos.harness.gating.looks import ONE, Looks
from trainchaos.harness.gating.regression import (
    SEEN,
    Tolerance,
    compare,
    is_open,
    least_seen,
    tolerance_of,
)
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.figures import Metric, Model
from trainchaos.harness.judge.measure.samples import per_arm, summarise
from trainchaos.harness.judge.results import Results, SlaResult, merge, titled
from trainchaos.harness.judge.verdict.gates import EXIT_CODES, sla_line

SCHEMA_VERSION = 1
COMPARED = ("detection_time", "recovery_time", "steps_lost", "samples_lost", "goodput", "step_time")
"""Metrics compared with a baseline unless others are named."""


class GateClause(SlaResult):
    """A clause of the gate: an SLA, or a metric against the baseline (then without a line).
    ``repeats``: repeats of the whole scenario that would settle it in a separate run; None:
    settled, or no number would.
    """

    against: str = Field(default="limit", description="'limit' or 'baseline'")
    repeats: int | None = None


class GateResult(Model):
    """``gate.json``. ``level``: how often chance alone may turn this gate red; ``share``: part of
    it for each clause that chance can break; ``family``: the number of those clauses; ``baseline``:
    id of the run compared with; ``planned``, ``looks``: looks at the run, see
    ``harness.gating.looks``; ``notes``: messages on both.
    """

    schema_version: int = SCHEMA_VERSION
    scenario: str
    run_id: str
    verdict: str
    exit_code: int
    reason: str
    level: float
    share: float
    family: int = 0
    planned: int = 1
    looks: int = 1
    extended: bool = False
    notes: list[str] = Field(default=[])
    baseline: str | None
    warnings: list[str]
    clauses: list[GateClause]
    simulated: bool = False
    unsealed: bool = False


@dataclass(frozen=True, kw_only=True)
class BaselineComparison:
    """A baseline to compare a run with. ``tolerances``: by metric, where not the default;
    ``metrics``: names; ``warnings``: why the two may not be comparable.
    """

    baseline: Baseline
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    metrics: Sequence[str] = COMPARED
    warnings: Sequence[str] = ()


class _Pair(NamedTuple):
    """A metric of one cell, in the run and in the baseline."""

    cell: str
    name: str
    now: Metric
    then: Metric
    tolerance: Tolerance


def gate(
    results: Results, against: BaselineComparison | None = None, looks: Looks = ONE
) -> GateResult:
    """Decide. A run that did not finish keeps its verdict; so do invariants, which one
    counterexample breaks.

    All clauses of all cells that chance can break share the level of this look (Bonferroni), so
    that it is the level of the whole gate. A gate passes only if every clause is shown to hold, and
    that needs no share (Berger 1982, intersection-union tests).
    """
    pairs, warnings = _pairs(results, against) if against else ([], [])
    chancy = sum(sla.severity == "fail" and is_statistical(sla) for sla in results.slas)
    chancy += sum(is_open(pair.now, pair.then, pair.tolerance) for pair in pairs)
    level = looks.level
    share = level / max(1, chancy)
    repeats = {cell.id: _repeats(results, cell.id) for cell in results.cells}
    clauses = [_sla(results, sla, share, level, repeats.get(sla.cell, 1)) for sla in results.slas]
    clauses += [_compared(pair, share, level, repeats[pair.cell]) for pair in pairs]
    verdict, reason = _verdict(results, clauses, against)
    if results.refused:
        verdict, reason = results.verdict, results.reason
    return GateResult(
        scenario=results.scenario,
        run_id=results.run_id,
        verdict=verdict,
        reason=reason,
        exit_code=(
            results.exit_code
            if verdict not in ("pass", "fail", "inconclusive")
            else EXIT_CODES[verdict]
        ),
        level=level,
        share=share,
        family=chancy,
        planned=looks.planned,
        looks=len(looks.looks),
        extended=looks.extended,
        notes=[
            *_settled(verdict, clauses),
            *(_seen(pairs, share) if level else ()),
            *_notes(looks, chancy, share, len(results.timed)),
        ],
        baseline=against.baseline.run_id if against else None,
        warnings=[*(against.warnings if against else ()), *warnings],
        clauses=clauses,
        simulated=results.simulated,
        unsealed=results.unsealed,
    )


def gated(results: Results, decided: GateResult) -> Results:
    """The results as the gate judges them, for reports: its clauses instead of the SLAs, its
    verdict and reason.
    """
    return results.model_copy(
        update={
            "slas": list(decided.clauses),
            "verdict": decided.verdict,
            "exit_code": decided.exit_code,
            "reason": decided.reason,
        }
    )


def write(run: RunDirectory, decided: GateResult) -> Path:
    """Write ``gate.json`` to the run directory. Raises InfrastructureError if the disk refuses."""
    path = run.root / "gate.json"
    write_json(path, decided, "free disk space")
    return path


def as_text(decided: GateResult, source: str) -> str:
    """The gate as text: one line for it, one per clause that did not pass, notes and warnings."""
    code = "" if decided.exit_code == 0 else f" (exit {decided.exit_code})"
    title = titled(decided.verdict, simulated=decided.simulated, unsealed=decided.unsealed)
    lines = [f"gate {title}{code}   {decided.reason}"]
    for clause in decided.clauses:
        if clause.verdict != "pass":
            soft = "warning only: " if clause.severity == "warn" else ""
            lines.append(f"  {clause.verdict:12}  {clause.cell}  {soft}{sla_line(clause, source)}")
    lines += [f"  {note}" for note in decided.notes]
    lines += [f"  warning: {warning}" for warning in decided.warnings]
    return "\n".join(
        "".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines
    )


def _notes(looks: Looks, family: int, share: float, cells: int) -> list[str]:
    """Notes on the level, and on an extension of the run."""
    over = f"{plural(family, 'clause')} that chance can break, in {plural(cells, 'cell')}"
    known = (
        f"red by chance in at most {100 * looks.level:.3g} % of such gates: {100 * share:.3g} % for"
        f" each of {over}"
    )
    if not family or not looks.level:
        known = "no clause that chance can break has any level"
    return [known, *([looks.words] if looks.words else [])]


def _seen(pairs: Sequence[_Pair], share: float) -> list[str]:
    """Note on the changes for the worse that the comparisons with the baseline can show; of a
    metric of several cells, the largest of these. Counts have none: the seed decides them.
    """
    least: dict[str, float] = {}
    for pair in (one for one in pairs if one.then.unit not in COUNT_UNITS):
        change = least_seen(pair.now, pair.then, pair.tolerance, share)
        if change is not None:
            least[pair.name] = max(change, least.get(pair.name, 0.0))
    # rounded up, as the smaller change would be seen less often
    shown = {name: math.ceil(100 * by - 1e-9) for name, by in least.items() if math.isfinite(by)}
    blind = [name for name in least if name not in shown]
    notes = []
    if shown:
        first, *others = (f"{name} by {percent} %" for name, percent in shown.items())
        said = f"a change for the worse of {first} or more would be seen {round(10 * SEEN)} times"
        notes.append(f"{said} of 10{''.join(f', of {one}' for one in others)}")
    if blind:
        notes.append(f"no change of {', '.join(blind)} would be seen, however large: repeat more")
    return notes


def _settled(verdict: str, clauses: Sequence[GateClause]) -> list[str]:
    """Note on how many repeats would settle all open clauses, if any number would."""
    hard = [clause for clause in clauses if clause.severity == "fail"]
    left = [clause for clause in hard if clause.verdict == "inconclusive"]
    if verdict != "inconclusive" or not left:
        return []
    numbers = [clause.repeats for clause in left if clause.repeats is not None]
    count = plural(len(left), "open clause")
    if len(numbers) < len(left):
        return [f"{len(left) - len(numbers)} of {count} would be settled by no number of repeats"]
    both = _both(any(clause.against == "baseline" for clause in left))
    return [f"needs --repeat {max(numbers)}{both} for all of {count}, in a separate run"]


def _both(baseline: bool) -> str:
    return " here and in the baseline" if baseline else ""


def _sla(results: Results, sla: SlaResult, share: float, level: float, repeats: int) -> GateClause:
    metric = next((c.metrics.get(sla.metric) for c in results.cells if c.id == sla.cell), None)
    clock = sla.error(metric.clock_bound) if metric else 0.0
    if level:
        decision = decide(
            sla, share if sla.severity == "fail" else level, clock_bound=clock, green=level
        )
    else:
        decision = decide(sla, LEVEL, clock_bound=clock)
        if decision.verdict != "fail" or is_statistical(sla):
            decision = _nothing_left(decision)
    if sla.step_s:
        seen = sla.shown(metric.better if metric else "neither")
        decision = replace(decision, detail=f"{decision.detail}; observed {seen}")
    return _clause(sla.model_dump(), decision, len(per_arm(sla.values, sla.arms)), repeats)


def _compared(pair: _Pair, share: float, level: float, repeats: int) -> GateClause:
    decision = compare(pair.now, pair.then, pair.tolerance, share or LEVEL, level or LEVEL)
    decision = decision if level else _nothing_left(decision)
    now = pair.now
    facts = {
        "cell": pair.cell,
        "metric": pair.name,
        "clause": f"no worse than the baseline{pair.tolerance.words}",
        "severity": "fail",
        "observed": now.median,
        "against": "baseline",
        **{name: getattr(now, name) for name in ("unit", "values", "arms", "of", "of_arms")},
    }
    return _clause(facts, decision, len(per_arm(now.values, now.arms)), repeats)


def _nothing_left(decision: ClauseDecision) -> ClauseDecision:
    """The decision of a look beyond the planned ones: the level is spent."""
    return ClauseDecision(
        verdict="inconclusive", detail=f"{decision.detail}; the level is spent by earlier looks"
    )


def _clause(facts: dict[str, Any], decision: ClauseDecision, n: int, repeats: int) -> GateClause:
    """``needed`` counts arms with a value: ``n`` of ``repeats`` had one."""
    wanted = None
    detail = decision.detail
    if decision.needed is not None and n:
        wanted = max(repeats + 1, math.ceil(decision.needed * repeats / n))
        both = _both(facts.get("against") == "baseline")
        sure = "if none breaks it" if decision.surely else "in 4 of 5 cases"
        detail += f"; needs n={decision.needed}: --repeat {wanted}{both} would settle it {sure}"
    return GateClause(**{**facts, "verdict": decision.verdict, "detail": detail, "repeats": wanted})


def _pairs(results: Results, against: BaselineComparison) -> tuple[list[_Pair], list[str]]:
    """Metrics that can be compared, and warnings about those without a counterpart."""
    pairs, warnings = [], []
    before = against.baseline.cells
    for cell in results.timed:
        if cell.id not in before:
            warnings.append(f"{cell.id} is not in the baseline: save a new one")
            continue
        for name in against.metrics:
            now, then = cell.metrics.get(name), before[cell.id].metrics.get(name)
            if then is None or not then.values:
                if now is not None and now.values and name in against.tolerances:
                    warnings.append(f"{name} of {cell.id} is not in the baseline")
                continue
            tolerance = against.tolerances.get(name, tolerance_of(then.unit))
            now = now or summarise(name, [])
            pairs.append(_Pair(cell.id, name, now, then, tolerance))
    gone = sorted(before.keys() - {cell.id for cell in results.cells})
    return pairs, warnings + [f"{name} of the baseline did not run" for name in gone]


def _repeats(results: Results, cell: str) -> int:
    return max(1, sum(arm.cell == cell and arm.arm == "faulted" for arm in results.arms))


def _verdict(
    results: Results, clauses: Sequence[GateClause], against: BaselineComparison | None
) -> tuple[str, str]:
    if results.verdict not in ("pass", "fail", "inconclusive"):
        return results.verdict, results.reason
    hard = [clause for clause in clauses if clause.severity == "fail"]
    found = [
        (f"{cell.id}: {name}: {f.witness}", f.verdict)
        for cell in results.cells
        for name, f in cell.invariants.items()
    ]
    verdict = merge([*(clause.verdict for clause in hard), *(each for _, each in found)])
    other = _other_reason(results)
    if verdict == "pass" and other:
        return "inconclusive", other
    if verdict == "pass":
        name = f", against {against.baseline.run_id}" if against else ""
        return (
            verdict,
            f"{len(hard)} of {len(hard)} clauses, {len(found)} of {len(found)} invariants{name}",
        )
    to_blame = [clause for clause in hard if clause.verdict == verdict]
    if to_blame:
        # of open ones the one that needs most: repeats that settle another leave this one open
        needs = [math.inf if c.repeats is None else c.repeats for c in to_blame]
        worst = to_blame[0 if verdict == "fail" else needs.index(max(needs))]
        where = f"{worst.cell}: " if len(results.cells) > 1 else ""
        return verdict, where + sla_line(worst, results.source)
    witness = (text for text, each in found if each == verdict)
    return verdict, next(witness, other or results.reason)


def _other_reason(results: Results) -> str:
    """Why a cell is inconclusive for a reason other than a clause or an invariant: arms that did
    not run, or nothing checked.
    """
    for cell in results.cells:
        hard = [s.verdict for s in results.slas if s.cell == cell.id and s.severity == "fail"]
        checked = [*hard, *(finding.verdict for finding in cell.invariants.values())]
        if not checked or (cell.verdict == "inconclusive" and merge(checked) == "pass"):
            return f"{cell.id}: {cell.reason}"
    return ""
