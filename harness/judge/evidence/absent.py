"""Plugins that a stored run was played with and that are not here, or refuse its parameters."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
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
from trainchaos.chaos.scenario.model import ResolvedRun, Scenario
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.workload import Workload
from trainchaos.recovery.policy.strategy import Strategy


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
