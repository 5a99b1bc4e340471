"""Loads a scenario file into concrete, checked cells; reports all errors at once, with positions.

Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading import commandchecks
from trainchaos.chaos.loading import overrides as settings
from trainchaos.chaos.loading.cautions import warnings
from trainchaos.chaos.loading.checks import check_cell, normalise
from trainchaos.chaos.loading.explain import validate
from trainchaos.chaos.loading.extends import extended
from trainchaos.chaos.loading.interpolate import ReferenceScope, Resolved, interpolate
from trainchaos.chaos.loading.matrix import Combination, expand
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.model import Cell, InvariantExclusion, Scenario
from trainchaos.chaos.schedule.arrivals import fill_traces
from trainchaos.chaos.source.bounds import tree_problems, work_problems
from trainchaos.chaos.source.diagnostics import (
    Loc,
    LocatedProblem,
    Problem,
    Span,
    in_order,
    render,
    scenario_error,
    unknown,
)
from trainchaos.chaos.source.source import Document, read_document

# A run has one of each, whatever the cell.
_SAME_IN_ALL_CELLS = ("name", "seed", "order")
_AXIS = "determinism"
_JUDGED_BY = "loss-equality"


@dataclass(frozen=True, kw_only=True)
class LoadedScenario:
    """A scenario file, read and checked.

    ``cells`` in the order of the matrix, then those that are played once with elastic sums beside
    them; ``warnings`` are ready to print.

    ``sla_lines``: metric -> line of each of its clauses in the file, in order; ``lines``: of the
    workload's keys (``workload.command``), for what is found out later.
    """

    path: Path
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...]
    sla_lines: dict[str, list[int]]
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the scenario."""
        return self.cells[0].scenario.name

    def chosen(self, only: Sequence[str]) -> tuple[Cell, ...]:
        """The cells of ``--cell``; all without it. Raises ScenarioError for an unknown one."""
        known = [cell.id for cell in self.cells]
        for name in only:
            if name not in known:
                raise ScenarioError(f"--cell: {unknown('cell', name, known)}")
        return tuple(cell for cell in self.cells if cell.among(only))


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A cell being loaded. Its problems are relative to ``resolved``; ``placed``: those in other
    files.
    """

    combination: Combination
    resolved: Resolved
    tree: Mapping[str, Any]
    scenario: Scenario | None
    problems: tuple[Problem, ...]
    placed: tuple[LocatedProblem, ...]


def load(
    path: Path,
    catalogue: Catalogue,
    *,
    overrides: Sequence[str | settings.Override] = (),
    env: Mapping[str, str] | None = None,
) -> LoadedScenario:
    """Read, resolve and check a scenario file.

    ``overrides``: ``a.b=value`` strings, or values set by separate options; ``env``: for
    ``${env:...}``.

    Raises ScenarioError with all errors.
    """
    original = extended(read_document(path), path)
    document = settings.apply(original, overrides)
    drafts, placed = _drafts(document, path, catalogue, env or {})
    placed += [p for draft in drafts for p in _place_all(document, draft.resolved, draft.problems)]
    placed += [p for draft in drafts for p in draft.placed]
    placed += _differing(document, drafts)
    placed += [problem for name, problem in _unused(document, drafts) if name in document.tree]
    if document.problems:
        # hide follow-up problems at places that already have one
        known = {(p.span.source, p.span.line, p.span.column) for p in document.problems}
        rest = [p for p in placed if (p.span.source, p.span.line, p.span.column) not in known]
        placed = [*document.problems, *rest]
    if placed:
        raise scenario_error(placed)
    cells = tuple(_cell(draft) for draft in drafts)
    exact = (beside(cell, draft.tree, catalogue) for cell, draft in zip(cells, drafts, strict=True))
    return LoadedScenario(
        path=path,
        cells=(*cells, *(cell for cell in exact if cell is not None)),
        warnings=_warnings(document, drafts, catalogue),
        sla_lines=_sla_lines(original, document, path, drafts),
        lines=_workload_lines(original, document, path, drafts),
    )


def _drafts(
    document: Document, path: Path, catalogue: Catalogue, env: Mapping[str, str]
) -> tuple[list[_Draft], list[LocatedProblem]]:
    tree = document.tree
    matrix = interpolate(
        tree.get("matrix"), ReferenceScope(matrix={}, vars={}, env=env), ("matrix",)
    )
    combinations, problems = expand(matrix.tree)
    placed = _place_all(document, matrix, [*matrix.problems, *problems])
    if not combinations:
        # Check the rest as far as it goes without a matrix.
        combinations = [Combination(id="", values=_first_values(matrix.tree))]
    body = {key: value for key, value in tree.items() if key != "matrix"}
    too_much = work_problems(len(combinations), body)
    placed += _place_all(document, matrix, too_much)
    few = combinations[:1] if too_much else combinations
    drafts = [_draft(document, path, combination, catalogue, env) for combination in few]
    return drafts, placed


def _first_values(matrix: Any) -> dict[str, tuple[Any, Loc]]:
    axes = matrix.items() if isinstance(matrix, dict) else ()
    return {
        name: (values[0] if isinstance(values, list) and values else None, ("matrix", name, 0))
        for name, values in axes
    }


def _draft(
    document: Document,
    path: Path,
    combination: Combination,
    catalogue: Catalogue,
    env: Mapping[str, str],
) -> _Draft:
    given, resolved = _interpolated(document.tree, combination, env)
    problems = [*given.problems, *resolved.problems]
    origins = {**given.origins, **resolved.origins}
    broken = {problem.loc for problem in problems} | document.broken
    broken |= {loc for loc, origin in origins.items() if origin in broken}
    if too_large := tree_problems(resolved.tree):
        return _Draft(
            combination=combination,
            resolved=replace(resolved, origins=origins),
            tree={},
            scenario=None,
            problems=(*problems, *too_large),
            placed=(),
        )
    concrete, found = normalise(resolved.tree, catalogue)
    problems += found

    def directory_of(loc: Loc) -> Path:
        source = document.locate(resolved.origin(loc)).source
        return (path if source.startswith("--") else Path(source)).parent

    commandchecks.place_directory(concrete, directory_of)
    found, placed = fill_traces(concrete, directory_of)
    problems += found
    variables = {} if document.tree.get("vars") is None else {"vars": given.tree}
    scenario, found = validate(Scenario, {**concrete, **variables})
    # A failed reference left a null behind, and was reported already.
    later = [p for p in [*found, *check_cell(concrete, catalogue)] if not _follows(p, broken)]
    # Checks of the whole file (loc ()) are also made separately, at their places.
    specific = [problem for problem in later if problem.loc]
    problems += specific or ([] if problems else later)
    merged = Resolved(
        tree=concrete,
        origins=origins,
        problems=(),
        used=given.used | resolved.used,
    )
    return _Draft(
        combination=combination,
        resolved=merged,
        tree=concrete,
        scenario=scenario,
        problems=tuple(problems),
        placed=tuple(placed),
    )


def _interpolated(
    tree: Mapping[str, Any], combination: Combination, env: Mapping[str, str]
) -> tuple[Resolved, Resolved]:
    """``vars`` of a cell, and all else of it but the matrix, with every reference replaced."""
    matrix = combination.values
    given = interpolate(
        tree.get("vars"), ReferenceScope(matrix=matrix, vars={}, env=env), ("vars",)
    )
    variables = {
        name: (value, ("vars", name))
        for name, value in (given.tree.items() if isinstance(given.tree, dict) else ())
    }
    body = {key: value for key, value in tree.items() if key not in ("vars", "matrix")}
    return given, interpolate(body, ReferenceScope(matrix=matrix, vars=variables, env=env))


def _follows(problem: Problem, broken: Collection[Loc]) -> bool:
    """Whether a problem only follows from an unreadable value at its place or inside it."""
    loc = problem.loc
    inside = not problem.on_key and loc and any(other[: len(loc)] == loc for other in broken)
    return loc in broken or bool(inside)


def _place_all(
    document: Document, resolved: Resolved, problems: Sequence[Problem]
) -> list[LocatedProblem]:
    return [
        LocatedProblem(_place(document, resolved, problem), problem.message) for problem in problems
    ]


def _place(document: Document, resolved: Resolved, problem: Problem) -> Span:
    span = document.locate(resolved.origin(problem.loc), on_key=problem.on_key)
    return span.narrowed(problem.word)


def _differing(document: Document, drafts: Sequence[_Draft]) -> list[LocatedProblem]:
    placed = []
    for key in _SAME_IN_ALL_CELLS:
        if len({repr(draft.tree.get(key)) for draft in drafts}) > 1:
            placed.append(
                LocatedProblem(
                    document.locate((key,)), f"{key} must be the same in every cell of the matrix"
                )
            )
    return placed


def _cell(draft: _Draft) -> Cell:
    assert draft.scenario is not None  # no problems, so it validated
    params = {name: value for name, (value, _) in draft.combination.values.items()}
    return Cell(id=draft.combination.id, params=params, scenario=draft.scenario)


def _warnings(
    document: Document, drafts: Sequence[_Draft], catalogue: Catalogue
) -> tuple[str, ...]:
    placed = [
        placed
        for draft in drafts
        if draft.scenario is not None
        for placed in _place_all(
            document, draft.resolved, list(warnings(draft.scenario, catalogue))
        )
    ]
    placed += [problem for name, problem in _unused(document, drafts) if name not in document.tree]
    return tuple(render(each, label="warning: ") for each in in_order(placed))


def _unused(document: Document, drafts: Sequence[_Draft]) -> Iterator[tuple[str, LocatedProblem]]:
    """Axes of the matrix that nothing refers to. One that is called as a key of the scenario is an
    error: its cells would be reported as what they are not.
    """
    used = {reference for draft in drafts for reference in draft.resolved.used}
    axes = {name for draft in drafts for name in draft.combination.values}
    for name in sorted(axes):
        if f"matrix.{name}" not in used:
            message = f"nothing uses ${{matrix.{name}}}: its cells differ in name only"
            if name in document.tree:
                message += f"; write {name}: ${{matrix.{name}}}"
            span = document.locate(("matrix", name), on_key=True)
            yield name, LocatedProblem(span, message)


def _sla_lines(
    original: Document, document: Document, path: Path, drafts: Sequence[_Draft]
) -> dict[str, list[int]]:
    lines: dict[str, list[int]] = {}
    for draft in drafts:
        for metric, clauses in (draft.tree.get("sla") or {}).items():
            places = [
                draft.resolved.origin(("sla", metric, index)) for index in range(len(clauses))
            ]
            lines.setdefault(
                metric, [_file_line(original, document, path, place) for place in places]
            )
    return lines


def _workload_lines(
    original: Document, document: Document, path: Path, drafts: Sequence[_Draft]
) -> dict[str, int]:
    found: dict[str, int] = {}
    for draft in drafts:
        for key in draft.tree.get("workload") or {}:
            place = draft.resolved.origin(("workload", key))
            found.setdefault(f"workload.{key}", _file_line(original, document, path, place))
    return found


def _file_line(original: Document, document: Document, path: Path, loc: Loc) -> int:
    """Line in the file; for a value set on the command line, of what it replaced or of what is
    around it; for one from a file that this one extends, of where it says so.
    """
    span = document.locate(loc)
    span = original.locate(loc) if span.source.startswith("--") else span
    return span.line if span.source == str(path) else original.locate(("extends",)).line


def beside(cell: Cell, tree: Mapping[str, Any], catalogue: Catalogue) -> Cell | None:
    """The cell that plays ``cell`` once with elastic sums, without SLAs. None if it would add
    nothing, cannot be played, or the scenario's ``tree`` sets ``workload.determinism`` itself.

    With fewer ranks, gradients are summed in another order, so the result is compared with a
    tolerance, which can hide a state that is wrong in the same way on all ranks. With elastic sums
    the order is the same for any number of ranks, and the result matches the control arm bit for
    bit. One such repeat is enough: the others keep the job's normal sums, and its normal times.
    """
    scenario = cell.scenario
    if _AXIS in tree["workload"] or not _may_differ(scenario, catalogue) or not _compared(scenario):
        return None
    workload = scenario.workload.model_copy(update={_AXIS: "elastic"})
    once = scenario.model_copy(update={"workload": workload, "repeat": 1, "sla": {}})
    name = f"{_AXIS}=elastic"
    return Cell(
        id=f"{cell.id},{name}" if cell.params else name,
        params={**cell.params, _AXIS: "elastic"},
        scenario=once,
        exact_for=cell.id,
    )


def _may_differ(scenario: Scenario, catalogue: Catalogue) -> bool:
    """Whether the strategy does not promise an exact result, and elastic sums would give one."""
    work = scenario.workload
    if (
        work.command is not None
        or work.shards > 1
        or scenario.recovery.params.get("batch") == "shrink"
    ):
        return False
    strategy, kind = (
        catalogue.strategies[scenario.recovery.strategy],
        catalogue.workloads[work.kind],
    )
    return not getattr(strategy, "exact", True) and bool(getattr(kind, "cuts_batches", False))


def _compared(scenario: Scenario) -> bool:
    """Whether the job has faults, and its result is compared with the control arm's."""
    asked = scenario.invariants
    if isinstance(asked, InvariantExclusion):
        judged = _JUDGED_BY not in asked.leave_out
    else:
        judged = isinstance(asked, str) or _JUDGED_BY in asked
    return judged and bool(scenario.faults) and scenario.baseline == "paired"
