"""``chaos gate``, ``chaos baseline``, and the gate of ``chaos run``, for continuous integration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import (
    FLAG,
    FORMAT,
    PATH,
    QUIET,
    RUN,
    option,
    seal_options,
    together,
)
from trainchaos.chaos.commands.shared.say import say, say_json, say_lines

if TYPE_CHECKING:
    from trainchaos.harness.gating.baseline import Baseline
    from trainchaos.harness.gating.gate import BaselineComparison, GateResult
    from trainchaos.harness.host.rundir import RunDirectory
    from trainchaos.harness.judge.results import Results

gate_options = together(
    option(
        "--baseline", PATH, "Also compare with this baseline, or run directory.", metavar="FILE"
    ),
    option(
        "--tolerance tolerances",
        None,
        "How much worse than the baseline is tolerated; repeatable.",
        multiple=True,
        metavar="[METRIC=]20%",
    ),
    option(
        "--metric metrics",
        None,
        "Compare this metric with the baseline; repeatable.",
        multiple=True,
        metavar="NAME",
    ),
    option("--other-machine", FLAG, "Compare even with a baseline of another machine."),
    option(
        "--looks",
        click.IntRange(1, 20),
        "Planned looks at this run, with repeats added in between; each has 1/K of the level. "
        " [default: 1]",
        metavar="K",
    ),
    option("--allow-inconclusive", FLAG, "Exit with 0 if nothing was shown to be broken."),
    option(
        "--github/--no-github",
        None,
        "Annotations for GitHub Actions; by default if it runs this.",
        default=None,
    ),
)
"""Of ``chaos gate`` and ``chaos run --gate``."""


@click.command()
@click.argument("run", type=RUN)
@gate_options
@seal_options
@FORMAT
@QUIET
def gate(run: Path, unsealed: bool, root: str, form: str, quiet: bool, **choices: Any) -> int:
    """Judge a stored run by confidence bounds, for continuous integration; see docs/ci.md.

    Fails only if a bound has crossed its limit. Writes gate.json, gate.xml (JUnit) and gate.md into
    the run directory, and all reports again, with its verdict.
    """
    from trainchaos.harness.host.rundir import open_run
    from trainchaos.harness.judge.verdict.judge import judge

    directory = open_run(run)
    results = judge(directory, unsealed=unsealed, root=root)
    return conclude(
        results, directory, {**choices, "gate": True}, form=form, quiet=quiet, err=False
    )


def check_choices(choices: dict[str, Any]) -> None:
    """Refuse invalid gate options before anything runs, such as a baseline of another machine.

    Raises click.UsageError, ToleranceError, BaselineError.
    """
    _tolerances(choices)
    _metrics(choices)
    needs_gate = {
        "--baseline": "baseline",
        "--tolerance": "tolerances",
        "--metric": "metrics",
        "--other-machine": "other_machine",
        "--allow-inconclusive": "allow_inconclusive",
        "--looks": "looks",
    }
    for given in (o for o, name in needs_gate.items() if choices[name] and not choices["gate"]):
        raise click.UsageError(f"{given} is for --gate")
    if choices["baseline"] is not None:
        from trainchaos.harness.gating.baseline import load, other_machine
        from trainchaos.harness.launch.devices import describe

        _refuse_machine(choices, other_machine(load(choices["baseline"]), describe()))


def _refuse_machine(choices: dict[str, Any], machine: Sequence[str]) -> None:
    from trainchaos.harness.gating.baseline import BaselineError

    if machine and not choices["other_machine"]:
        raise BaselineError(
            f"{choices['baseline']} is of another machine: {'; '.join(machine)}",
            hint="save one on this machine, or add --other-machine to compare anyway",
        )


def conclude(
    results: Results,
    directory: RunDirectory,
    choices: dict[str, Any],
    *,
    form: str,
    quiet: bool,
    err: bool = True,
) -> int:
    """Finish a run: apply the gate if ``choices["gate"]`` is set, and publish to GitHub. Returns
    the exit code.

    ``choices``: options of ``gate_options`` and ``gate``; ``err``: with ``form`` json, standard
    output has something else, and the gate's text goes to standard error. Raises what reading a
    baseline raises.
    """
    from trainchaos.harness.gating import gate as gates
    from trainchaos.harness.gating.looks import look
    from trainchaos.harness.judge.verdict.judge import write_results
    from trainchaos.reports import html, junit, markdown, render_all

    shown, code, summary = results, results.exit_code, directory.root / "summary.md"
    if choices["gate"]:
        against = _against(results, directory, choices)
        decided = gates.gate(results, against, look(directory, results, choices.get("looks")))
        # after the look, which reads the stored results as the previous ones
        write_results(directory, results)
        gates.write(directory, decided)
        shown, code, summary = (
            gates.gated(results, decided),
            decided.exit_code,
            directory.root / "gate.md",
        )
        allowed = bool(choices["allow_inconclusive"]) and not results.refused
        for name in ("gate.xml", "junit.xml"):
            junit.write(directory, shown, directory.root / name, allow_inconclusive=allowed)
        for name in ("gate.md", "summary.md"):
            markdown.write(directory, shown, directory.root / name, decided.notes)
        render_all(directory, shown, but=("html", "junit", "markdown"))
        html.render(directory, results, shown)
        err = err and form == "json"
        _say(decided, results.source, form="text" if err else form, quiet=quiet, err=err)
        if code == errors.EXIT_INCONCLUSIVE and allowed:
            code = errors.EXIT_PASS
            say("exits with 0 nevertheless: --allow-inconclusive", err=True)
    _publish(shown, summary, choices["github"])
    return code


def _say(decided: GateResult, source: str, *, form: str, quiet: bool, err: bool) -> None:
    from trainchaos.harness.gating.gate import as_text

    if form == "json":
        say_json(decided, err=err)
        return
    first, *others = as_text(decided, source).split("\n")
    say(first, err=err)
    say_lines(() if quiet else others, 6, err=err)


def _publish(results: Results, summary: Path, wanted: bool | None) -> None:
    """Write annotations to standard error, which GitHub reads too, and the summary to the file that
    GitHub names.
    """
    from trainchaos.reports.outlets import github

    if wanted is None:
        wanted = github.in_actions(os.environ)
    if not wanted:
        return
    for annotation in github.remarks(results, os.environ):
        say(str(annotation), err=True)
    target = os.environ.get("GITHUB_STEP_SUMMARY", "")
    if target and summary.is_file():
        github.append_summary(summary.read_text(encoding="utf-8"), Path(target))


def _against(
    results: Results, directory: RunDirectory, choices: dict[str, Any]
) -> BaselineComparison | None:
    """The baseline to compare a run with. Raises BaselineError if the two are not comparable."""
    from trainchaos.harness.gating.baseline import (
        UNSEALED,
        BaselineError,
        baseline_of,
        differences,
        load,
    )
    from trainchaos.harness.gating.gate import COMPARED, BaselineComparison
    from trainchaos.harness.gating.regression import tolerance_of

    if choices["baseline"] is None:
        return None
    shares, everywhere = _tolerances(choices)
    named = _metrics(choices)
    found = load(choices["baseline"])
    if results.verdict not in ("pass", "fail", "inconclusive"):
        return None  # the run keeps its verdict; there is nothing to compare
    machine, played = differences(found, baseline_of(directory, results))
    again = "save a new one: chaos baseline save RUN"
    if played:
        raise BaselineError(f"{choices['baseline']} is of another test: {played[0]}", hint=again)
    if not found.cells.keys() & {cell.id for cell in results.cells}:
        raise BaselineError(f"{choices['baseline']} has none of the cells of this run", hint=again)
    _refuse_machine(choices, machine)
    from trainchaos.harness.judge.measure.measure import METRICS

    units = {name: METRICS[name].unit for name in METRICS}
    chosen = {
        name: tolerance_of(unit, shares.get(name, everywhere)) for name, unit in units.items()
    }
    tolerances = {n: t for n, t in chosen.items() if everywhere is not None or n in shares}
    metrics = named or tuple(dict.fromkeys((*COMPARED, *shares)))
    warnings = [f"the baseline is of another machine: {line}" for line in machine]
    if not found.digest:
        warnings.append(f"the baseline is {UNSEALED}")
    return BaselineComparison(
        baseline=found, tolerances=tolerances, metrics=metrics, warnings=warnings
    )


def _tolerances(choices: dict[str, Any]) -> tuple[dict[str, float], float | None]:
    """Tolerances by metric, and the one for all metrics. Raises ToleranceError, and
    click.UsageError for an unknown metric.
    """
    from trainchaos.harness.gating.regression import parse_share

    shares, everywhere = {}, None
    for text in choices["tolerances"]:
        name, equals, share = text.rpartition("=")
        if equals:
            shares[_metric(name.strip())] = parse_share(share)
        else:
            everywhere = parse_share(share)
    return shares, everywhere


def _metrics(choices: dict[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_metric(name) for name in choices["metrics"]))


def _metric(name: str) -> str:
    from trainchaos.chaos.scenario.sla import nearest
    from trainchaos.harness.judge.measure.measure import METRICS

    if name not in METRICS:
        near = nearest(name, tuple(METRICS)) or "see: chaos list metrics"
        raise click.UsageError(
            f"unknown metric {name!r}; did you mean {near!r}?"
            if near in METRICS
            else f"unknown metric {name!r}; {near}"
        )
    return name


@click.group()
def baseline() -> None:
    """Save a run's measurements, to compare later runs with."""


@baseline.command()
@click.argument("run", type=RUN)
@option("-o --output", PATH, "Output file [default: baselines/<scenario>.json].")
def save(run: Path, output: Path | None) -> None:
    """Judge a stored run and save its values, machine and workload in a small file."""
    from trainchaos.chaos.files import write_json
    from trainchaos.harness.gating.baseline import baseline_of
    from trainchaos.harness.host.rundir import open_run
    from trainchaos.harness.judge.verdict.judge import judge_whole

    directory = open_run(run)
    found = baseline_of(directory, judge_whole(directory))
    path = output if output is not None else Path("baselines") / f"{found.scenario}.json"
    write_json(path, found, "choose another place with -o")
    simulated = ", simulated" if found.simulated else ""
    say(f"{path}: {found.scenario}, {found.run_id}, {len(found.cells)} cells{simulated}")
    if found.verdict != "pass":
        say(f"warning: the run's verdict was {found.verdict}", err=True)


@baseline.command()
@click.argument("file", type=PATH)
@FORMAT
def show(file: Path, form: str) -> None:
    """Show a baseline: its origin and its values."""
    from trainchaos.harness.gating.baseline import load

    found = load(file)
    say_json(found) if form == "json" else say(_as_text(found))


def _as_text(found: Baseline) -> str:
    from trainchaos.chaos.units import interval
    from trainchaos.harness.gating.baseline import UNSEALED
    from trainchaos.harness.judge.verdict.gates import quantity

    machine = ", ".join(f"{name} {value}" for name, value in found.machine.items() if value)
    sealed = f"sha256:{found.digest}" if found.digest else UNSEALED
    run = f", of a run sealed as sha256:{found.root}" if found.root else ""
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items())
    lines = [
        (
            f"{found.scenario}   {found.run_id}, {found.started}, seed {found.seed}, verdict"
            f" {found.verdict}{', simulated' if found.simulated else ''}"
        ),
        f"machine   {machine}",
        f"versions  {versions}",
        f"digest    {sealed}{run}",
    ]
    for name, cell in found.cells.items():
        lines.append(f"{name}")
        for metric, values in cell.metrics.items():
            median = quantity(values.median, values.unit, values.better)
            ends = interval((values.min, values.max), values.unit)
            lines.append(f"  {metric:20}  median {median}  {ends}  n={values.counted}")
    return "\n".join(lines)


COMMANDS = [gate, baseline]
