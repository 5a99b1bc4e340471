"""Tightens the limits of a scenario to what a run of it observed.

Only values of SLA clauses change, in place: comments and everything else of the file stay as they
are. A limit is never loosened, and none is made of a run that did not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import LoadedScenario
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.chaos.scenario.sla import Clause, evaluate, parse_clause
from trainchaos.harness.draft.findings import FEW_STEPS, readable
from trainchaos.harness.host.rundir import open_run, read_resolved
from trainchaos.harness.judge.measure.catalogue import METRICS
from trainchaos.harness.judge.results import Results
from trainchaos.harness.judge.verdict.judge import judge_whole

TIMES = 2.0
"""A limit of time or of lost steps, as a multiple of the worst observed: machines differ from day
to day, and nothing holds a command at the step of its fault.
"""
PLACES = 3
"""Steps at which faults must have hit before a job is known to lose next to nothing wherever it is
hit.
"""
NOT_COMPARED = {"sla", "description", "tags", "vars"}
"""Of a scenario, what may have changed since the run."""


@dataclass(frozen=True, kw_only=True)
class Tightened:
    """``text``: of the scenario; ``source``: its file; ``said``: a line for each clause;
    ``changed``: whether any limit is another one.
    """

    text: str
    source: Path
    said: list[str]
    changed: bool


def tighten(path: Path, out: Path | None, *, load: Callable[[Path], LoadedScenario]) -> Tightened:
    """The scenario of a run with its limits tightened. ``path``: the run directory; ``out``: a file
    of the scenario, if it is not where the run found it.

    Raises ScenarioError if the run cannot say what is usual, or is one of another scenario.
    """
    run = open_run(path)
    resolved, results = read_resolved(run), judge_whole(run)
    _refuse(path, results)
    source = out if out is not None and out.exists() else Path(resolved.source)
    if not source.is_file():
        raise ScenarioError(
            f"{source}, the scenario of {path}, is not here",
            hint="name it with --out, or run this where chaos run was started",
        )
    loaded = load(source)
    _refuse_other(source, loaded, resolved, path)
    text = source.read_text()
    said, edits = [], []
    for metric, index, clause, cells in _clauses(loaded):
        place = clause_in(text, metric, index)
        why = _no_limit(results) if metric == "steps_lost" else ""
        new = None
        if not why:
            new, why = tightened(clause, _values(results, metric, clause, cells))
        where = f"{source}:{place.line + 1}  {metric}" if place else f"{source}  {metric}"
        where += f" of {place.fault}" if place and place.fault else ""
        if new is None or place is None or place.text != clause.text:
            why = why if new is None else f"{why}; it is not written here as it is: change it there"
            said.append(f"{where}  {clause.text}  stays: {why}")
            continue
        said.append(f"{where}  {clause.text} -> {new}  ({why})")
        edits.append((place, new))
    return Tightened(text=edited(text, edits), source=source, said=said, changed=bool(edits))


def _refuse(path: Path, results: Results) -> None:
    why = f"its verdict is {results.verdict}" + (f": {results.reason}" if results.reason else "")
    if results.simulated:
        why = "it was simulated: its times are drawn, not measured"
    if results.simulated or results.verdict != "pass":
        raise ScenarioError(
            f"{path} cannot tighten anything: {why}",
            hint="run the scenario again with real processes, until it passes",
        )


def _refuse_other(source: Path, loaded: LoadedScenario, resolved: ResolvedRun, run: Path) -> None:
    now, then = _essence(loaded.cells), _essence(resolved.cells)
    name = resolved.cells[0].scenario.name if resolved.cells else None
    if loaded.name != name:
        what = f"{run} is a run of {name!r}, and {source} is {loaded.name!r}"
        raise ScenarioError(what, hint="name the run of it")
    for cell in then:
        what = f"a cell {cell} that {source} does not have"
        if cell in now:
            what = next(iter(_differing(now[cell], then[cell])), "")
            what = f"the scenario as it was before: {what} has changed since" if what else ""
        if what:
            raise ScenarioError(
                f"{run} is a run of {name!r} with {what}", hint="run the scenario as it is now"
            )


def _essence(cells: Sequence[Cell]) -> dict[str, Mapping[str, Any]]:
    return {cell.id: cell.scenario.model_dump(mode="json", exclude=NOT_COMPARED) for cell in cells}


def _differing(now: Any, then: Any, at: str = "") -> Iterator[str]:
    """Dotted keys whose values differ."""
    if isinstance(now, dict) and isinstance(then, dict):
        for key in sorted({*now, *then}):
            yield from _differing(now.get(key), then.get(key), f"{at}.{key}" if at else str(key))
    elif now != then:
        yield at


# ---- clauses


def _clauses(loaded: LoadedScenario) -> Iterator[tuple[str, int, Clause, set[str]]]:
    """(metric, index, clause, ids of the cells in which it holds): a file has one block of
    limits.
    """
    for metric, checks in loaded.cells[0].scenario.sla.items():
        for index, check in enumerate(checks):
            cells = {one.id for one in loaded.cells if check.covers(one.scenario.faults)}
            yield metric, index, parse_clause(check.check, METRICS[metric].unit), cells


def _values(
    results: Results, metric: str, clause: Clause, cells: Collection[str]
) -> list[list[float]]:
    """The values of each of these cells that has any, in the clause's unit."""
    mine = (one for one in results.slas if one.metric == metric and one.unit == clause.unit)
    rows = {one.cell: one.values for one in mine if one.cell in cells}
    return [values for values in rows.values() if values]


def _no_limit(results: Results) -> str:
    """Why no limit is made of the steps that were lost, for people; "" if one is: a job that began
    again lost them all, and right behind a checkpoint a fault costs nothing, and a moment before it
    all steps since the last one.
    """
    for one in results.faults:
        if one.restored_step == 0 and one.steps_lost > FEW_STEPS:
            return (
                f"the job began again from step 1 after {one.fault} in {one.cell}, repeat"
                f" {one.repeat}, and lost all {one.steps_lost} steps, of which no limit is made:"
                " have it go on from a checkpoint"
            )
    hits = [one for one in results.faults if one.landed]
    steps = sorted({one.step for one in hits if one.step is not None})
    if len(steps) >= PLACES or not hits or max(one.steps_lost for one in hits) > FEW_STEPS:
        return ""
    where = f"step{'s' * (len(steps) > 1)} {' and '.join(map(str, steps))}" if steps else "one time"
    return (
        f"at {where} next to nothing was lost, as it is right behind a checkpoint: have a fault hit"
        " further from one"
    )


def tightened(clause: Clause, cells: Sequence[list[float]]) -> tuple[str | None, str]:
    """The new clause, None if it stays; and why. ``cells``: what was observed in each."""
    if not cells:
        return None, "nothing was observed of it" + (" in steps" if clause.in_steps else "")
    high = clause.op.startswith(">")
    worst = (min if high else max)(evaluate(clause, values)[1] for values in cells)
    seen = f"{_figure(worst, clause)} was the worst of {sum(map(len, cells))} observed"
    if not math.isfinite(worst) or clause.op == "==":
        return None, seen
    limit = _limit(worst, clause)
    if limit <= clause.limit if high else limit >= clause.limit:
        return None, f"{seen}, and {_figure(limit, clause)} would be no tighter"
    op = clause.op if limit != worst else {"<": "<=", ">": ">="}.get(clause.op, clause.op)
    return f"{clause.aggregate} {op} {_figure(limit, clause)}", seen


def _limit(worst: float, clause: Clause) -> float:
    """Times and lost steps: twice the worst, in steps rounded up. Other counts: the worst. What
    should be high: half of the worst.
    """
    if clause.op.startswith(">"):
        return float(f"{worst / TIMES:.1g}")
    if clause.in_steps:
        return float(max(1, math.ceil(TIMES * worst)))
    if clause.unit != "s":
        return TIMES * worst if clause.unit == "steps" else worst
    seconds = TIMES * worst
    if seconds >= 1:
        return readable(seconds)
    size = 10.0 ** math.floor(math.log10(max(seconds, 0.001)))  # rounded up to one digit
    return max(0.001, float(f"{math.ceil(seconds / size - 1e-9) * size:.6g}"))


def _figure(value: float, clause: Clause) -> str:
    """With the unit that a limit is written with."""
    if clause.in_steps:
        return f"{value:.4g} steps"
    return f"{value:.4g}s" if clause.unit == "s" else f"{value:.6g}"


# ---- the file


@dataclass(frozen=True, kw_only=True)
class ClausePlace:
    """Where a clause stands: ``line``, ``column`` from 0, and its ``text``; ``fault``: the kind
    that it is for, if it names one.
    """

    line: int
    column: int
    text: str
    fault: str = ""


def clause_in(text: str, metric: str, index: int) -> ClausePlace | None:
    """Where a clause is written, None if it is not in this file (but in one that it extends)."""
    tree = YAML(typ="rt").load(text)
    sla = tree.get("sla") if isinstance(tree, CommentedMap) else None
    clauses = sla.get(metric) if isinstance(sla, CommentedMap) else None
    if not isinstance(clauses, CommentedSeq) or index >= len(clauses):
        return None
    clause, fault = clauses[index], ""
    if isinstance(clause, CommentedMap):
        line, column = clause.lc.value("check")
        clause, fault = clause["check"], str(clause.get("fault", ""))
    else:
        line, column = clauses.lc.item(index)
    return ClausePlace(line=line, column=column, text=str(clause).strip(), fault=fault)


def edited(text: str, edits: Sequence[tuple[ClausePlace, str]]) -> str:
    """The text with these clauses replaced, the last first so that places stay right."""
    rows = text.split("\n")
    for place, new in sorted(edits, key=lambda edit: (-edit[0].line, -edit[0].column)):
        row = rows[place.line]
        rest = row[place.column :].replace(place.text, new, 1)
        rows[place.line] = row[: place.column] + rest
    return "\n".join(rows)
