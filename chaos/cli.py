"""The command line and composition root: with ``chaos.commands``, the only code here that may
import the other packages.

Heavy imports are inside the commands, so that ``chaos --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import columns, errors
from trainchaos.chaos.commands import all_commands
from trainchaos.chaos.commands.gate import check_choices, conclude, gate_options
from trainchaos.chaos.commands.shared.group import CommandGroup
from trainchaos.chaos.commands.shared.options import (
    FLAG,
    FORMAT,
    QUIET,
    RUN,
    RUNS,
    SCENARIO,
    SET,
    TAINTS,
    build_catalogue,
    complete_cell,
    complete_launcher,
    option,
    seal_options,
    use_taints,
)
from trainchaos.chaos.commands.shared.plugins import with_plugins
from trainchaos.chaos.commands.shared.program import run_as_process
from trainchaos.chaos.commands.shared.say import say, say_json, say_lines
from trainchaos.chaos.units import plural
from trainchaos.chaos.version import version_option

if TYPE_CHECKING:
    from trainchaos.chaos.loading.load import LoadedScenario
    from trainchaos.chaos.scenario.catalogue import Catalogue
    from trainchaos.harness.host.rundir import RunDirectory
    from trainchaos.harness.judge.results import Results

EPILOG = """\b
Exit codes: 0 pass, 1 an SLA or invariant failed, 2 usage or an invalid scenario, 3 inconclusive,
4 harness or infrastructure broke, 5 unsafe (something is left behind),
6 halted by a stop condition, 7 nothing ran (capability missing),
130 interrupted, 143 terminated."""

_SCENARIO = click.argument("scenario", type=SCENARIO)
_RUN = click.argument("run", type=RUN)
_SEED = option("--seed", click.IntRange(0, 2**32 - 1), "Overrides the scenario's seed.")
_REPEAT = option("--repeat", int, "Overrides the scenario's repeat.")
_LAUNCHER = option(
    "--launcher", None, "Overrides the scenario's launcher.", shell_complete=complete_launcher
)
_CELL = option(
    "--cell only",
    None,
    "Run only this cell of the matrix; repeatable.",
    multiple=True,
    metavar="ID",
    shell_complete=complete_cell,
)


@click.group(
    cls=CommandGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@version_option
def cli() -> None:
    """Break distributed training on purpose, and measure how it recovers."""


@cli.command()
@_SCENARIO
@RUNS
@_SEED
@_REPEAT
@SET
@_LAUNCHER
@_CELL
@FORMAT
@QUIET
@option("--gate", FLAG, "Judge by confidence bounds, for continuous integration.")
@gate_options
@TAINTS
@option("-v --verbose", FLAG, "Also show every invariant.")
@option("--no-color", FLAG, "No colour (NO_COLOR does the same).")
def run(
    scenario: Path,
    runs: Path,
    taints: Path | None,
    form: str,
    quiet: bool,
    verbose: bool,
    no_color: bool,
    **choices: Any,
) -> int:
    """Run a scenario: train, break, recover, measure, judge, report."""
    from trainchaos.chaos.planning.load import OthersLoad, busy_words

    load = OthersLoad()
    from trainchaos.chaos.planning.crowd import cores_here, crowd_warnings
    from trainchaos.harness.host.rundir import RunDirectory
    from trainchaos.harness.run.runner import run_scenario
    from trainchaos.reports import render_all

    if no_color:
        os.environ["NO_COLOR"] = "1"
    use_taints(taints)
    check_choices(choices)
    loaded = _load(scenario, choices)
    cells = loaded.chosen(choices["only"])
    scenarios, cores = [cell.scenario for cell in cells], cores_here()
    crowded = crowd_warnings(scenarios, cores)
    busy = busy_words(scenarios, load.share(os.cpu_count() or cores), cores)
    said = (f"warning: {busy}",) if busy else ()
    _warn(loaded.warnings + crowded + said, quiet)
    _heal_before(runs)
    results = run_scenario(
        loaded,
        runs=runs,
        seed=choices["seed"],
        live=form == "text" and not quiet,
        argv=sys.argv[1:],
        launcher=choices["launcher"],
        only=tuple(cell.id for cell in cells),
        busy=busy,
    )
    directory = RunDirectory(runs / results.scenario / results.run_id)
    render_all(directory, results)
    gated = bool(choices["gate"])
    _show(results, directory, form=form, quiet=quiet, verbose=verbose, gated=gated)
    return conclude(results, directory, choices, form=form, quiet=quiet)


@cli.command()
@click.argument("scenarios", nargs=-1, required=True, type=SCENARIO)
@SET
@QUIET
def validate(scenarios: tuple[Path, ...], sets: tuple[str, ...], quiet: bool) -> int:
    """Check scenario files, showing all errors at once; starts nothing."""
    code = errors.EXIT_PASS
    for path in scenarios:
        try:
            loaded = _load(path, {"sets": sets})
        except errors.ScenarioError as error:
            say(str(error), err=True)
            code = error.exit_code
            continue
        _warn(loaded.warnings, quiet)
        if not quiet:
            say(f"{path}: valid, {plural(len(loaded.cells), 'cell')}")
    return code


@cli.command()
@_SCENARIO
@_SEED
@_REPEAT
@SET
@_LAUNCHER
@_CELL
@FORMAT
@TAINTS
@option("--sbatch", FLAG, "Print a batch script that runs it on Slurm instead.")
@option("--k8s", FLAG, "Print a manifest that runs it on Kubernetes instead.")
def plan(scenario: Path, form: str, sbatch: bool, k8s: bool, **choices: Any) -> None:
    """Show what a run would do: resolved scenario, fault schedule, expected duration. Starts
    nothing.
    """
    from trainchaos.chaos.planning import planview
    from trainchaos.chaos.planning.crowd import cores_here

    use_taints(choices["taints"])
    catalogue = build_catalogue()
    loaded = _load(scenario, choices, catalogue)
    cells = loaded.chosen(choices["only"])
    cores = None if sbatch or k8s else cores_here()
    planned = planview.plan_run(loaded, catalogue, seed=choices["seed"], cells=cells, cores=cores)
    if sbatch:
        from trainchaos.harness.launch.slurm.script import script_of

        say(script_of(planned, scenario, choices), nl=False)
    elif k8s:
        from trainchaos.harness.launch.kubernetes import manifest_of

        say(manifest_of(planned, scenario, choices), nl=False)
    elif form == "json":
        say_json(planview.as_json(planned))
    else:
        say(planview.as_text(planned, columns.width_of(sys.stdout)))
        _warn(planned.warnings, quiet=False)


@cli.command()
@_RUN
@seal_options
@FORMAT
@QUIET
@option("-v --verbose", FLAG, "Also show every invariant.")
def analyze(run: Path, unsealed: bool, root: str, form: str, quiet: bool, verbose: bool) -> int:
    """Judge a stored run again from its event logs alone, and rewrite its results.json; where that
    changes, or a gate wrote its reports, these too.
    """
    from trainchaos.harness.host.rundir import open_run
    from trainchaos.reports import render_all

    before = _text(open_run(run).results)
    directory, results = _judged(run, quiet=quiet, unsealed=unsealed, root=root)
    changed, gated = before != _text(directory.results), (directory.root / "gate.json").exists()
    if before and (changed or gated):
        render_all(directory, results)
    if changed and gated:
        say(
            f"gate.json, gate.xml and gate.md are older than this verdict: chaos gate {run}",
            err=True,
        )
    _show(results, directory, form=form, quiet=quiet, verbose=verbose)
    return results.exit_code


@cli.command()
@_RUN
@seal_options
@QUIET
def report(run: Path, unsealed: bool, root: str, quiet: bool) -> None:
    """Write all reports of a stored run again: report.html, summary.md, junit.xml, metrics.prom,
    trace.json.
    """
    from trainchaos.reports import render_all

    directory, results = _judged(run, quiet=quiet, unsealed=unsealed, root=root)
    for path in render_all(directory, results):
        if not quiet:
            say(str(path))


@cli.command()
def schema() -> None:
    """Print the JSON Schema of scenario files, for editors (save it beside them as
    scenario.schema.json).
    """
    from trainchaos.chaos.scenario.schema import scenario_schema

    say_json(scenario_schema(build_catalogue()))


for _command in all_commands():
    cli.add_command(_command)
with_plugins(cli)


def main() -> None:
    """Entry point of ``chaos`` and ``trainchaos``; exits with the codes of ``chaos --help``."""
    sys.exit(run_as_process(invoke, sys.argv[1:]))


def invoke(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Errors for people go to standard error, never as a traceback.
    """
    try:
        return int(
            cli.main(args=list(argv), prog_name="chaos", standalone_mode=False) or errors.EXIT_PASS
        )
    except click.ClickException as error:
        error.show()
        return errors.EXIT_USAGE
    except errors.ChaosError as error:
        say(str(error), err=True)
        return error.exit_code
    except (OSError, SystemExit) as error:
        if isinstance(error, SystemExit) and "_CHAOS_COMPLETE" in os.environ:  # a shell asked
            return int(error.code or 0)
        # click ends with 1 when standard output is closed, and 1 means "an SLA failed" here.
        say(f"cannot write the output: {error}", err=True)
        return errors.EXIT_HARNESS
    except (KeyboardInterrupt, click.Abort):
        say("interrupted", err=True)
        return errors.EXIT_INTERRUPTED
    except Exception:
        # Python would exit with 1, which means "an SLA failed" here.
        traceback.print_exc()
        say("this is a defect of chaos itself; please report it with the lines above", err=True)
        return errors.EXIT_HARNESS


def _load(
    path: Path, choices: dict[str, Any], catalogue: Catalogue | None = None
) -> LoadedScenario:
    """Load with ``--set``, ``--repeat`` and ``--launcher`` applied."""
    from trainchaos.chaos.loading.load import load
    from trainchaos.chaos.loading.overrides import of_option

    overrides = [*choices["sets"]]
    overrides += [
        of_option(f"--{name}", name, choices[name])
        for name in ("repeat", "launcher")
        if choices.get(name) is not None
    ]
    return load(path, catalogue or build_catalogue(), overrides=overrides, env=os.environ)


def _heal_before(runs: Path) -> None:
    """Clean up after dead runs before another one starts; prints only what it did or
    could not do.
    """
    from trainchaos.harness.run.heal import heal_all

    for one in heal_all(runs):
        if one.state in ("healed", "left"):
            say("\n".join(one.lines), err=True)


def _warn(warnings: Sequence[str], quiet: bool) -> None:
    from trainchaos.chaos import plugins

    for warning in () if quiet else (*warnings, *plugins.left_out()):
        say(str(warning), err=True)


def _text(path: Path) -> str:
    """Of a file that may be missing or damaged."""
    from trainchaos.chaos.files import read_bytes

    with suppress(OSError, ValueError):
        return read_bytes(path).decode()
    return ""


def _judged(path: Path, *, quiet: bool, unsealed: bool, root: str) -> tuple[RunDirectory, Results]:
    """Judge a stored run and keep the results in its directory."""
    from trainchaos.harness.gating.looks import note
    from trainchaos.harness.host.rundir import open_run
    from trainchaos.harness.judge.verdict.judge import judge, write_results
    from trainchaos.harness.run.progress import tell_judging

    directory = open_run(path)
    if not quiet:
        tell_judging(directory)
    results = judge(directory, unsealed=unsealed, root=root)
    note(directory, results)
    write_results(directory, results)
    return directory, results


def _show(
    results: Results,
    directory: RunDirectory,
    *,
    form: str,
    quiet: bool,
    verbose: bool,
    gated: bool = False,
) -> None:
    """The outcome on standard output: the closing summary, one line, or all of ``results.json``."""
    from trainchaos.reports.outlets.terminal import summary

    if form == "json":
        say_json(results)
        return
    wide = columns.width_of(sys.stdout)
    text = summary(results, directory, gated=gated, width=None if quiet else wide)
    if quiet:
        line = text.split("\n", 1)[0]
        text = (
            line if not results.exit_code or results.reason in line else f"{line}\n{results.reason}"
        )
    say(text)
    for cell in results.cells if verbose else ():
        say(f"invariants of {cell.id}")
        for name, finding in cell.invariants.items():
            line = f"  {finding.verdict:12}  {name}  {finding.witness}".rstrip()
            say_lines([line], 16)
