"""``chaos fuzz``: search for what breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from chaos import errors
from chaos.commands._say import say
from chaos.scenario.sla import parse_duration


class _Duration(click.ParamType):
    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return parse_duration(value) if isinstance(value, str) else float(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option(
    "--what",
    type=click.Choice(["recovery", "loader", "judge"]),
    default="recovery",
    show_default=True,
    help="What is searched: the recovery stack, how files are read, or how logs are judged.",
)
@click.option(
    "--strategy", metavar="NAME", help="Only this recovery strategy; all of them without it."
)
@click.option(
    "--budget",
    type=_Duration(),
    default="60s",
    show_default=True,
    help="How long to search: 90s, 5m, 1h.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Another one, another search.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes that search.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("scenarios/regressions"),
    show_default=True,
    help="Where the scenarios of finds are written.",
)
@click.option(
    "--runs",
    type=click.IntRange(1),
    help="End when each process has tried so many: with a seed the same search each time.",
)
@click.option(
    "--real", is_flag=True, help="Play them with processes of this machine, not on the simulator."
)
@click.option(
    "--launcher",
    type=click.Choice(["local", "agents"]),
    help="With --real: where ranks run.  [default: local]",
)
@click.option("--worker", hidden=True, help="One process of a search; JSON.")
def fuzz(
    what: Literal["recovery", "loader", "judge"],
    strategy: str | None,
    budget: float,
    seed: int,
    jobs: int,
    into: Path,
    runs: int | None,
    real: bool,
    launcher: str | None,
    worker: str | None,
) -> int:
    """Try random scenarios, files and logs until something breaks, and make it small.

    Exit code 0: nothing was found; 1: something was; 130: interrupted, and what was found by then
    is written. What a real run shows only once in three plays is kept in INTO/unsteady, and is no
    find.
    """
    from harness.fuzz.play.play import strategies
    from harness.fuzz.worker import SIM, work
    from harness.fuzz.workers import search

    if worker is not None:
        from chaos.cli import build_catalogue

        work(build_catalogue(), **json.loads(worker))
        return errors.EXIT_PASS

    if strategy is not None and what == "loader":
        raise click.UsageError(
            "--strategy is of what is played; with --what loader nothing is: leave it out"
        )
    if strategy is not None and strategy not in strategies():
        raise errors.ScenarioError(
            f"--strategy {strategy}: there is no such strategy",
            hint=f"one of {', '.join(strategies())}",
        )
    if real and what != "recovery":
        raise click.UsageError(f"--real is of what is played; with --what {what} leave it out")
    if launcher is not None and not real:
        raise click.UsageError("--launcher says where real processes run: say --real too")
    found, interrupted = search(
        strategy=strategy,
        budget_s=budget,
        seed=seed,
        jobs=jobs,
        into=into,
        tell=say,
        what=what,
        launcher=(launcher or "local") if real else SIM,
        most_runs=runs,
    )
    if interrupted:
        return errors.EXIT_INTERRUPTED
    return errors.EXIT_FAIL if found else errors.EXIT_PASS


COMMANDS = [fuzz]
