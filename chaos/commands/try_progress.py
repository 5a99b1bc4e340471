"""``chaos try-progress``: what a scenario's progress expression finds in a log, before any run."""

from __future__ import annotations

import math
from pathlib import Path

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import PATH, SCENARIO, SET
from trainchaos.chaos.commands.shared.say import say


@click.command("try-progress")
@click.argument("scenario", type=SCENARIO)
@click.argument("log", type=PATH)
@SET
def try_progress(scenario: Path, log: Path, sets: tuple[str, ...]) -> int:
    """Show which steps and losses a scenario's progress finds in LOG, output of its command.

    Exit code 1: it finds no step, or what it finds cannot be the steps of this workload.
    """
    from trainchaos.chaos.commands.shared.options import build_catalogue
    from trainchaos.chaos.loading.load import load
    from trainchaos.harness.script.listen.trial import lines_of, try_lines

    spec = load(scenario, build_catalogue(), overrides=[*sets]).cells[0].scenario.workload
    if spec.command is None or spec.progress == "beacon":
        what = "workload.progress is beacon" if spec.command else "the workload is no command"
        raise errors.ScenarioError(
            f"{scenario}: {what}: no output is read",
            hint="--set 'workload.progress={preset: NAME}', or give progress: {regex: ...}",
        )
    try:
        found = try_lines(lines_of(log), spec.progress, spec.steps)
    except OSError as error:
        raise errors.ScenarioError(f"{log}: cannot be read: {error.strerror}") from error
    say(f"{log}: {found.lines} lines, {len(found.steps)} report a step")
    if found.steps:
        say(f"steps {min(found.steps)} to {max(found.steps)}; {_losses(found.losses)}")
    for report, line in found.shown:
        loss = "" if report.loss is None else f"  loss {report.loss:g}"
        say(f"  step {report.step}{loss}  | {line}")
    for problem, lines in found.odd:
        say(f"{problem}:")
        for line in lines:
            say(f"  | {line}")
    for note in found.notes:
        say(f"note: {note}")
    for problem in found.wrong:
        say(f"wrong: {problem}", err=True)
    return errors.EXIT_FAIL if found.wrong else errors.EXIT_PASS


def _losses(losses: list[float]) -> str:
    if not losses:
        return "no losses"
    finite = [loss for loss in losses if math.isfinite(loss)]
    text = f", {min(finite):g} to {max(finite):g}" if finite else ""
    bad = len(losses) - len(finite)
    return f"{len(losses)} losses{text}" + (f", {bad} not finite" if bad else "")


COMMANDS = [try_progress]
