"""``chaos fuzz``: searches for defects by random scenarios and damaged logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FLAG, build_catalogue, option
from trainchaos.chaos.commands.shared.quantities import span
from trainchaos.chaos.commands.shared.say import say


@click.command()
@option(
    "--what",
    click.Choice(["recovery", "judge"]),
    "What to search for defects: the recovery stack, or judging of logs.",
    "recovery",
)
@option("--strategy", None, "Only this recovery strategy.  [default: all]", metavar="NAME")
@option("--budget", span(), "How long to search: 90s, 5m, 1h.", "60s")
@option("--seed", click.IntRange(0), "Seed of the search.", 0)
@option("--jobs", click.IntRange(1, 256), "Parallel search processes.", 1)
@option(
    "--into",
    click.Path(path_type=Path, file_okay=False),
    "Directory for the scenarios of finds.",
    Path("scenarios/regressions"),
)
@option(
    "--runs",
    click.IntRange(1),
    "Stop after this many tries per process; makes a search with a seed repeatable.",
)
@option("--real", FLAG, "Play scenarios with real processes on this machine, not on the simulator.")
@option(
    "--launcher",
    click.Choice(["local", "agents"]),
    "With --real: where ranks run.  [default: local]",
)
@option("--worker", None, "Act as one process of a search; JSON.", hidden=True)
def fuzz(
    what: Literal["recovery", "judge"],
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
    """Try random scenarios and logs until something breaks, and minimize what broke.

    Exit code 0: nothing found; 1: something found; 130: interrupted, with all finds so far written.
    A failure that a real run shows only once in three plays is kept in INTO/unsteady and is not
    counted as a find.
    """
    from trainchaos.harness.fuzz.play.play import strategies
    from trainchaos.harness.fuzz.worker import SIM, work
    from trainchaos.harness.fuzz.workers import search

    if worker is not None:
        work(build_catalogue(), **json.loads(worker))
        return errors.EXIT_PASS

    if strategy is not None and strategy not in strategies():
        raise errors.ScenarioError(
            f"--strategy {strategy}: unknown strategy",
            hint=f"one of {', '.join(strategies())}",
        )
    if real and what != "recovery":
        raise click.UsageError("--real is for the recovery stack; leave it out with --what judge")
    if launcher is not None and not real:
        raise click.UsageError("--launcher says where real processes run; it needs --real")
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
