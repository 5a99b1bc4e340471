"""A planned run that a cluster is asked for: what a batch script for Slurm and a manifest for
Kubernetes have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from trainchaos.chaos import plugins
from trainchaos.chaos.planning.planview import RunPlan
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.requirements import refuse_impossible


def largest_under(planned: RunPlan, kind: str) -> tuple[Scenario, Launcher]:
    """The cell with the most nodes, and the launcher ``kind`` with that cell's parameters, if they
    are its own. Raises ScenarioError if a fault needs something that this launcher cannot do.
    """
    launcher = plugins.load(plugins.LAUNCHERS, Launcher)[kind]
    for each in planned.cells:
        spec = each.cell.scenario.launcher.model_copy(update={"kind": kind})
        scenario = each.cell.scenario.model_copy(update={"launcher": spec})
        refuse_impossible(each.cell.model_copy(update={"scenario": scenario}), launcher())
    largest = max((each.cell.scenario for each in planned.cells), key=lambda s: s.launcher.nodes)
    own = largest.launcher.params if largest.launcher.kind == kind else {}
    return largest, launcher(**own)


def options_again(scenario: Scenario, kind: str, choices: Mapping[str, Any]) -> list[str]:
    """The options of ``chaos plan``, by name, as words for ``chaos run``."""
    words = [word for value in choices.get("sets", ()) for word in ("--set", value)]
    if scenario.launcher.kind != kind or choices.get("launcher"):
        words += ["--launcher", kind]
    for option in ("seed", "repeat"):
        if choices.get(option) is not None:
            words += [f"--{option}", str(choices[option])]
    return [*words, *(word for cell in choices.get("only", ()) for word in ("--cell", cell))]


def filled(template: Path, **context: Any) -> str:
    """The text of a template of Jinja; a name that the context lacks is an error
    (jinja2.UndefinedError).
    """
    made = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return made.from_string(template.read_text(encoding="utf-8")).render(context)
