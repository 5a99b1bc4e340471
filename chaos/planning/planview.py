"""Plans a run without starting anything: cells, arms, schedule, expected duration."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML

from trainchaos.chaos import columns
from trainchaos.chaos.loading.load import LoadedScenario
from trainchaos.chaos.planning.crowd import crowd_warnings, start_s, step_s
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.model import Cell, Scenario
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.chaos.schedule.plan import PlannedFault, plan_scenario, repeat_seed
from trainchaos.chaos.units import plural

# Seconds to start, stop and judge an arm, to recover, and for a step of a workload that gives no
# estimate; measured with 4 ranks on 2 cores, accurate to a factor of two.
_ARM_S = 5.0
_INCIDENT_S = 1.0
_STEP_S = 0.05
_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatPlan:
    """The faults of one faulted arm. ``seed``: of this repeat."""

    repeat: int
    seed: int
    faults: tuple[PlannedFault, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellPlan:
    """One cell and its repeats. ``spares``: warm processes beside the ranks."""

    cell: Cell
    spares: int
    repeats: tuple[RepeatPlan, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A whole run.

    ``estimate_s``: roughly estimated wall time in seconds; ``guessed``: how long a step takes is
    not known, as it is a command's; ``arms``: number of trainings, controls included.
    """

    scenario: str
    seed: int
    arms: int
    estimate_s: float
    guessed: bool
    cells: tuple[CellPlan, ...]
    warnings: tuple[str, ...]


def plan_run(
    loaded: LoadedScenario,
    catalogue: Catalogue,
    *,
    seed: int | None,
    cells: Sequence[Cell],
    cores: int | None = None,
) -> RunPlan:
    """Plan every repeat of these cells.

    ``seed`` None: the scenario's; ``cores``: processors of this machine, None if it runs elsewhere.
    Raises ScenarioError for a fault without target.
    """
    first = loaded.cells[0].scenario
    chosen = first.seed if seed is None else seed
    planned = tuple(plan_cell(cell, catalogue, chosen) for cell in cells)
    return RunPlan(
        scenario=first.name,
        seed=chosen,
        arms=sum(cell.scenario.repeat * _arms_per_repeat(cell.scenario) for cell in cells),
        estimate_s=sum(_cell_estimate_s(cell.scenario, catalogue, cores) for cell in cells),
        guessed=any(cell.scenario.workload.command is not None for cell in cells),
        cells=planned,
        warnings=loaded.warnings
        + (crowd_warnings([cell.scenario for cell in cells], cores) if cores else ()),
    )


def plan_cell(cell: Cell, catalogue: Catalogue, seed: int) -> CellPlan:
    """Plan every repeat of one cell."""
    scenario = cell.scenario
    spares = 0  # unknown for a command
    if scenario.workload.command is None:
        strategy = catalogue.strategies[scenario.recovery.strategy](**scenario.recovery.params)
        spares = int(getattr(strategy, "spares_wanted", 0))
    repeats = []
    for repeat in range(scenario.repeat):
        own = repeat_seed(seed, repeat)
        faults = plan_scenario(scenario, catalogue.faults, seed=own, spares=spares)
        repeats.append(RepeatPlan(repeat=repeat, seed=own, faults=faults))
    return CellPlan(cell=cell, spares=spares, repeats=tuple(repeats))


def as_json(run: RunPlan) -> dict[str, Any]:
    """The plan as plain values."""
    return {
        "scenario": run.scenario,
        "seed": run.seed,
        "arms": run.arms,
        "estimate_s": None if run.guessed else round(run.estimate_s, 1),
        "cells": [
            {
                "id": each.cell.id,
                "params": each.cell.params,
                "spares": each.spares,
                "scenario": each.cell.scenario.model_dump(mode="json"),
                "repeats": [dataclasses.asdict(repeat) for repeat in each.repeats],
            }
            for each in run.cells
        ],
        "warnings": list(run.warnings),
    }


def as_text(run: RunPlan, width: int | None = None) -> str:
    """The plan for people: what will happen, the resolved scenario, the schedule. ``width``: of a
    terminal.
    """
    rows = [("cell", "repeat", "fault", "kind", "target", "when")]
    for each in run.cells:
        for repeat in each.repeats:
            rows += [
                (
                    each.cell.id,
                    str(repeat.repeat),
                    fault.id,
                    fault.kind,
                    target_text(fault),
                    when_text(fault),
                )
                for fault in repeat.faults
            ]
    schedule = table(rows, width=width) if len(rows) > 1 else "  no faults"
    return f"{headline(run)}\n\n{_resolved(run)}\nschedule (seed {run.seed})\n{schedule}"


def headline(run: RunPlan) -> str:
    """One line: what is trained, how often, how long it takes."""
    scenario = run.cells[0].cell.scenario
    work, spares = scenario.workload, max(cell.spares for cell in run.cells)
    who = f"{work.ranks} ranks{_layout(work)}" + (f" + {plural(spares, 'spare')}" if spares else "")
    arms = "faulted, control" if _arms_per_repeat(scenario) == 2 else "faulted"
    exact = sum(each.cell.exact_for is not None for each in run.cells)
    cells, repeats = plural(len(run.cells) - exact, "cell"), plural(scenario.repeat, "repeat")
    beside = f" + {exact} x ({arms}) with elastic sums" if exact else ""
    shape = f"{cells} x {repeats} x ({arms}){beside} = {plural(run.arms, 'arm')}"
    what = work.title
    takes = f"about {_minutes(run.estimate_s)} (an estimate)"
    if run.guessed:
        takes = "each takes as long as the command"
    return f"{run.scenario} · {what}, {who}, {work.steps} steps · {shape} · {takes}"


def _layout(work: WorkloadSpec) -> str:
    """How the ranks share the model, if they do."""
    if work.shards == 1:
        return ""
    mesh, what = work.mesh, f"{work.shards} shards"
    if mesh is not None:
        what = " x ".join(f"{dim} {size}" for dim, size in mesh.grid.items() if size > 1)
    if work.shards == work.ranks:
        return " (one copy of the model)" if mesh is None else f" (one copy, {what})"
    return f" ({work.ranks // work.shards} replicas of {what})"


def target_text(fault: PlannedFault) -> str:
    """What a planned fault hits: ``rank 2``, ``ranks 0, 1``, ``spare 0``, ``node 1``, ``latest
    checkpoint``.

    Separate arrivals are listed in order.
    """
    if fault.each:
        one_by_one = [
            dataclasses.replace(fault.aimed((number, "")), each=())
            for number in range(len(fault.each))
        ]
        texts = [target_text(each) for each in one_by_one]
        return _some(texts, ", then ") if len(set(texts)) > 1 else texts[0]
    if fault.checkpoint is not None:
        return (
            "latest checkpoint"
            if fault.checkpoint == "latest"
            else f"checkpoint of step {fault.checkpoint}"
        )
    parts = []
    people = (
        ()
        if fault.links
        else (("rank", fault.ranks), ("spare", fault.spares), ("node", fault.nodes))
    )
    for name, numbers in people:
        if numbers:
            parts.append(f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    if fault.links:
        shown = [f"{source}→{other}" for source, other in fault.links]
        parts.append(f"link{'s' if len(shown) > 1 else ''} {_some(shown)}")
    return " and ".join(parts) or "the job"


def when_text(fault: PlannedFault) -> str:
    """When a planned fault fires, for how long and how often."""
    if fault.times_s:
        when = f"{_some([f'{time_s:g}' for time_s in fault.times_s])} s after the first step starts"
    elif fault.event is not None:
        when = f"{fault.event} number {fault.nth}"
    elif fault.ranks:
        when = _some([f"step {step}, {phase}" for step, phase in fault.points], "; ")
    else:
        when = _some([f"step {step}" for step, _ in fault.points], "; ")
    if fault.declined and (fault.event is None or fault.max_fires == 1):
        when = "; ".join(part for part in (when if _fires(fault) else "", _declined(fault)) if part)
    if not when:
        return "never"
    if fault.duration_s is not None:
        when += f", for {fault.duration_s:g} s"
    if fault.duration_steps is not None:
        when += f", for {plural(fault.duration_steps, 'step')}"
    return when if fault.max_fires == 1 else f"{when}, up to {fault.max_fires} times"


def _fires(fault: PlannedFault) -> bool:
    return bool(fault.points or fault.times_s)


def _declined(fault: PlannedFault) -> str:
    return f"not at {_some(fault.declined)} (probability {fault.probability:g})"


def _some(texts: Sequence[str], between: str = ", ") -> str:
    """The first of many."""
    more = len(texts) - _SHOWN
    return between.join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def table(rows: Sequence[Sequence[str]], indent: str = "  ", width: int | None = None) -> str:
    """Rows with aligned columns, the first row as head."""
    return "\n".join(columns.table(rows, width=width, indent=indent, headed=True))


def _resolved(run: RunPlan) -> str:
    """The resolved scenario: what all cells share, then what differs by cell."""
    dumped = {
        each.cell.id: each.cell.scenario.model_dump(
            mode="json", exclude={"matrix"}, exclude_none=True
        )
        for each in run.cells
    }
    first, *others = dumped.values()
    shared = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    own = {
        name: {k: v for k, v in values.items() if k not in shared}
        for name, values in dumped.items()
    }
    return _yaml(shared if not others else {**shared, "cells": own})


def _yaml(value: Any) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 110
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def _arms_per_repeat(scenario: Scenario) -> int:
    return 2 if scenario.baseline == "paired" else 1


def _cell_estimate_s(scenario: Scenario, catalogue: Catalogue, cores: int | None) -> float:
    work, each_s, arm_s = scenario.workload, _STEP_S, _ARM_S
    if work.command is None:
        params = work.params if work.size is None else {**work.params, "size": work.size}
        typical = getattr(catalogue.workloads[work.kind](**params), "typical_step_s", None)
        each_s = typical() if callable(typical) else _STEP_S
        if cores is not None:
            each_s, arm_s = each_s + step_s(scenario, cores), arm_s + start_s(scenario, cores)
    arm_s += work.steps * each_s
    return scenario.repeat * (
        _arms_per_repeat(scenario) * arm_s + len(scenario.faults) * _INCIDENT_S
    )


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds / 5) * 5)} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
