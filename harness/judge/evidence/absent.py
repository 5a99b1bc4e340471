"""Plugins that a stored run was played with and that are not here."""

from __future__ import annotations

import shlex

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.plugins import FAULTS, LAUNCHERS, OPTION, STRATEGIES, load, named_in
from trainchaos.chaos.scenario.model import ResolvedRun, Scenario
from trainchaos.harness.launch.launcher import Launcher
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


def _said(resolved: ResolvedRun, what: str, name: str) -> str:
    given = " ".join(f"{OPTION} {shlex.quote(one)}" for one in named_in(resolved.reproduce))
    return f"no {what} here is called {name!r}: give {given or f'{OPTION} DIR'}, as for the run"
