"""Options and arguments that several commands share, with the values that a shell completes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, split_arg_string

from trainchaos.chaos.errors import ScenarioError

if TYPE_CHECKING:
    from trainchaos.chaos.scenario.catalogue import Catalogue

PATH: click.Path = click.Path(path_type=Path)
RUNS_DIRECTORY = Path("runs")
FLAG = object()
"""The type of an option without a value."""


def option(names: str, kind: Any, text: str, *default: Any, **more: Any) -> Any:
    """An option by its names, type (None: text), help, and the default that its help shows."""
    if kind is FLAG:
        return click.option(*names.split(), is_flag=True, help=text, **more)
    shown = {"default": default[0], "show_default": True} if default else {}
    return click.option(*names.split(), type=kind, help=text, **shown, **more)


def _starting(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


class ScenarioPath(click.Path):
    """A scenario file, or ``builtin:NAME``: one that comes with this program."""

    name = "scenario"

    def __init__(self) -> None:
        super().__init__(path_type=Path, readable=False)  # loading says why it cannot read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As in the base. Raises ScenarioError for a program, and a name that is not built in."""
        from trainchaos.chaos.loading import builtin

        if isinstance(value, str) and value.startswith(builtin.PREFIX):
            return builtin.find(value)
        if isinstance(value, str) and not os.path.exists(value) and shutil.which(value):
            raise ScenarioError(
                f"{value} is a program, and no scenario",
                hint=f"chaos init -- {value} ...  writes a scenario for a command of yours",
            )
        return super().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files, and what is built in. Bash takes a word to end at a colon."""
        from trainchaos.chaos.loading import builtin

        if incomplete.startswith(builtin.PREFIX[:3]):
            return _starting(
                (f"{builtin.PREFIX}{name}" for name in builtin.scenarios()), incomplete
            )
        return super().shell_complete(ctx, param, incomplete)


class RunPath(click.Path):
    """A run directory."""

    name = "run"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Run directories below ``--runs``, the newest of each scenario first; else any path."""
        runs = Path(ctx.params.get("runs") or RUNS_DIRECTORY)
        found = (str(path) for path in sorted(runs.glob("*/*"), reverse=True) if path.is_dir())
        return _starting(found, incomplete) or super().shell_complete(ctx, param, incomplete)


SCENARIO = ScenarioPath()
RUN = RunPath()
RUNS = option("--runs", PATH, "Directory of run directories.", RUNS_DIRECTORY)
FORMAT = option("--format form", click.Choice(["text", "json"]), "Output format.", "text")
QUIET = option("-q --quiet", FLAG, "Print less.")
SET = option(
    "--set sets",
    None,
    "Change a value of the scenario; repeatable.",
    multiple=True,
    metavar="A.B=VALUE",
)
TAINTS = option(
    "--taints",
    PATH,
    "List of tainted places. Default: $CHAOS_TAINTS, else trainchaos/taints.yaml in"
    " $XDG_STATE_HOME or ~/.local/state.",
    metavar="FILE",
)


def use_taints(path: Path | None) -> None:
    """Have launchers use the list of tainted places that a person named, as processes below this
    one do. Raises TaintError if there is none.
    """
    if path is not None:
        from trainchaos.recovery.health.taints import ENVIRONMENT, TaintList

        TaintList(path, needed=True).read()
        os.environ[ENVIRONMENT] = str(path.absolute())


def _plugin_names(package: str, incomplete: str) -> list[CompletionItem]:
    from trainchaos.chaos import plugins

    return _starting((source.name for source in plugins.sources(package)), incomplete)


def complete_launcher(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The launchers."""
    from trainchaos.chaos import plugins

    return _plugin_names(plugins.LAUNCHERS, incomplete)


def complete_stack(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The stacks of a comparison; of a list with commas, its last word."""
    from trainchaos.chaos import plugins

    before, comma, last = incomplete.rpartition(",")
    return [
        CompletionItem(f"{before}{comma}{item.value}")
        for item in _plugin_names(plugins.STACKS, last)
    ]


def build_catalogue() -> Catalogue:
    """Everything a scenario may name, from the modules of the plugin packages. Does not import
    torch.
    """
    from trainchaos.chaos import plugins
    from trainchaos.chaos.fault.base import Fault
    from trainchaos.chaos.scenario.catalogue import Catalogue
    from trainchaos.harness.judge.checkers import NAMES
    from trainchaos.harness.judge.measure.measure import METRICS
    from trainchaos.harness.launch.launcher import Launcher
    from trainchaos.harness.launch.workload import Workload
    from trainchaos.recovery.policy.strategy import Strategy

    return Catalogue(
        faults=plugins.load(plugins.FAULTS, Fault),
        strategies=plugins.load(plugins.STRATEGIES, Strategy),
        launchers=plugins.load(plugins.LAUNCHERS, Launcher),
        workloads=plugins.load(plugins.WORKLOADS, Workload),
        metrics={name: metric.unit for name, metric in METRICS.items()},
        checkers=frozenset(NAMES),
        per_arm=frozenset(name for name, metric in METRICS.items() if metric.per == "arm"),
    )


def complete_cell(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The cells of the scenario on the same command line. It is not parsed while the value of
    ``--cell`` is missing, so its words are searched.
    """
    from trainchaos.chaos.errors import ScenarioError
    from trainchaos.chaos.loading.load import load

    for word in split_arg_string(os.environ.get("COMP_WORDS", "")):
        try:
            path = SCENARIO.convert(word, None, None)
            if path.suffix in (".yaml", ".yml") and path.is_file():
                cells = load(path, build_catalogue(), env=os.environ).cells
                return _starting((cell.id for cell in cells), incomplete)
        except ScenarioError:
            continue
    return []


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Options that several commands have, as one decorator."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


seal_options = together(
    option("--unsealed", FLAG, "Judge a run although its seal is broken."),
    option(
        "--root",
        None,
        "The root digest that the run's seal must have, as the run printed it.",
        default="",
        metavar="DIGEST",
    ),
)
"""Of commands that judge a stored run."""
