"""What each arm's log must contain according to the resolved scenario: identity, provisioned
processes, faults.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import DamagedRun, ScenarioError
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.files import reason
from trainchaos.chaos.plugins import (
    FAULTS,
    LAUNCHERS,
    OPTION,
    STRATEGIES,
    WORKLOADS,
    load,
    named_in,
)
from trainchaos.chaos.scenario.model import Cell, ResolvedRun, Scenario
from trainchaos.chaos.schedule.plan import PlannedFault, plan_scenario, repeat_seed
from trainchaos.chaos.schedule.trigger import triggers
from trainchaos.harness.inject.occurrences import announcement
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.workload import Workload
from trainchaos.recovery.policy.strategy import Strategy

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expectations for one arm. ``repeat``, ``seed``: its identity, None if only its cell is known;
    ``spares``: the strategy's number; ``plan``: fault -> announcement due in the log, as made by
    ``harness.inject.occurrences.announcement``; ``most``: fault -> largest allowed number of
    injections; ``problem``: why a part of this could not be derived.
    """

    repeat: int | None = None
    seed: int | None = None
    spares: int | None = None
    plan: Mapping[str, Facts] | None = None
    most: Mapping[str, int] | None = None
    problem: str = ""


def expected_of(resolved: ResolvedRun, cell: Cell, repeat: int, arm: str) -> Expected:
    """Derive what an arm must be from the scenario in the run directory; its plan is drawn again
    from its seed.
    """
    seed = repeat_seed(resolved.seed, repeat)
    scenario, spares = cell.scenario, 0
    if missing := absent_plugin(resolved, scenario):
        return Expected(repeat=repeat, seed=seed, problem=missing)
    try:
        if scenario.workload.command is None:
            strategies = load(STRATEGIES, Strategy)
            spares = strategies[scenario.recovery.strategy](
                **scenario.recovery.params
            ).spares_wanted
        planned = _plan(cell, seed, spares) if arm == "faulted" else {}
    except Exception as error:  # a scenario of another version may hold anything
        return Expected(repeat=repeat, seed=seed, problem=f"{type(error).__name__}: {error}")
    return Expected(
        repeat=repeat,
        seed=seed,
        spares=spares,
        plan={name: facts for name, (facts, _) in planned.items()},
        most={name: most for name, (_, most) in planned.items()},
    )


def _plan(cell: Cell, seed: int, spares: int) -> dict[str, tuple[Facts, int]]:
    """Fault -> announcement and largest number of injections."""
    kinds = load(FAULTS, Fault)
    plan = plan_scenario(cell.scenario, kinds, seed=seed, spares=spares)
    return {
        each.id: (json.loads(json.dumps(announcement(each))), _most(each.planned))
        for each in triggers(plan, kinds, ranks=cell.scenario.workload.ranks)
    }


def _most(planned: PlannedFault) -> int:
    """Largest number of injections: each trigger ``max_fires`` times on each target."""
    triggers = len(planned.points) + len(planned.times_s) + (planned.event is not None)
    targets = max(
        len(planned.ranks) + len(planned.spares), len(planned.nodes), len(planned.links), 1
    )
    return triggers * targets * planned.max_fires


def absent_plugin(resolved: ResolvedRun, scenario: Scenario) -> str:
    """The fault kind or strategy that is not here, with what to do; empty if all are."""
    faults = load(FAULTS, Fault)
    for fault in scenario.faults:
        if fault.kind not in faults:
            return _said(resolved, "fault kind", fault.kind)
    strategy = scenario.recovery.strategy
    if scenario.workload.command is None and strategy not in load(STRATEGIES, Strategy):
        return _said(resolved, "strategy", strategy)
    return ""


def refuse_unknown_launcher(resolved: ResolvedRun) -> None:
    """Raise ScenarioError for a launcher that is not here: it tells what was simulated, without
    which nothing can be judged.
    """
    launchers = load(LAUNCHERS, Launcher)
    for cell in resolved.cells:
        if cell.scenario.launcher.kind not in launchers:
            raise ScenarioError(_said(resolved, "launcher", cell.scenario.launcher.kind))


def refuse_wrong_params(resolved: ResolvedRun, path: Path) -> None:
    """Raise DamagedRun for parameters that no fault, workload, strategy or launcher of that name
    takes: a run writes none. ``path``: of the resolved scenario.
    """
    for cell in resolved.cells:
        spec = cell.scenario
        named: list[tuple[str, type, str, Mapping[str, Any]]] = []
        if spec.workload.command is None:
            named = [
                (WORKLOADS, Workload, spec.workload.kind, spec.workload.params),
                (STRATEGIES, Strategy, spec.recovery.strategy, spec.recovery.params),
                (LAUNCHERS, Launcher, spec.launcher.kind, spec.launcher.params),
            ]
        named += [(FAULTS, Fault, fault.kind, fault.params) for fault in spec.faults]
        for what, base, name, params in named:
            kind: Any = load(what, base).get(name)
            if kind is None:
                continue  # what is said of it is said elsewhere
            try:
                kind(**params)
            except (TypeError, ValueError) as error:
                raise DamagedRun(f"{path} is damaged: params of {name}: {reason(error)}") from error


def _said(resolved: ResolvedRun, what: str, name: str) -> str:
    given = " ".join(f"{OPTION} {shlex.quote(one)}" for one in named_in(resolved.reproduce))
    return f"no {what} here is called {name!r}: give {given or f'{OPTION} DIR'}, as for the run"
