"""``chaos project``: what the recoveries of a small run mean for a cluster of any size."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from trainchaos.chaos import columns
from trainchaos.chaos.commands.shared.options import FORMAT
from trainchaos.chaos.commands.shared.projection import options
from trainchaos.chaos.commands.shared.say import say, say_json

if TYPE_CHECKING:
    from trainchaos.harness.projection.result import Projected, Projection

COMPARED = (
    "ranks",
    "strategy",
    "projected",
    "95 % of such means",
    "measured",
    "arms",
    "95 %",
    "residual",
    "",
)
HEAD = (
    "GPUs",
    "strategy",
    "goodput",
    "mean, 95 % interval",
    "formula",
    "failures",
    "lost",
    "a second costs",
)
OF_COMPARISONS = frozenset({"compare", "runs", "seed", "jobs", "into", "form", "quiet"})
"""Options that a comparison uses. With any other one something is to be projected too."""
TOLD_S = 10.0
"""Between two lines of progress where there is no terminal."""


@click.command()
@options
@FORMAT
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def project(form: str, quiet: bool, into: Path, **choices: Any) -> None:
    """Project goodput, lost time and money to clusters of any size, for each strategy, from the
    recoveries that runs measured or from given ones; see docs/projection.md.

    Formulas and an event simulation are set beside each other wherever both apply.
    """
    from trainchaos.chaos.commands.shared import asked
    from trainchaos.harness.projection import projection
    from trainchaos.harness.projection.compare import compare
    from trainchaos.harness.projection.observed import read_stored
    from trainchaos.reports.projection import page

    failures = asked.failures(choices)
    mix = asked.causes(choices, failures)
    jobs = choices["jobs"] or len(os.sched_getaffinity(0))
    with _progress(quiet, "judging --runs") as each:
        runs = read_stored(choices["runs"], each, jobs)
    with _progress(quiet, "judging --compare") as each:
        others = read_stored(choices["compare"], each, jobs)
    costs = asked.costs(choices, runs, mix)
    setting = asked.setting(choices, failures, mix, runs, list(costs))
    if others and not _asks_for_more():
        found = projection.nothing(setting)
    else:
        with _progress(quiet, "projecting") as each:
            found = projection.project(setting, costs, failures.said, each, jobs)
    if others:
        with _progress(quiet, "comparing") as each:
            compared, cautions = compare(others, runs, choices["seed"], each)
        cautions = [*cautions, *found.cautions]
        found = found.model_copy(update={"compared": compared, "cautions": cautions})
    page.write(found, into)
    if form == "json":
        say_json(found)
    else:
        for line in lines(found):
            say(line)
        say(f"report  {into / page.NAME}")


def _asks_for_more() -> bool:
    """Whether an option was given that a comparison does not use."""
    context = click.get_current_context()
    return any(
        context.get_parameter_source(name) is not ParameterSource.DEFAULT
        for name in context.params
        if name not in OF_COMPARISONS
    )


def lines(found: Projection) -> list[str]:
    """For a terminal: a table for each size, and what the figures rest on."""
    from trainchaos.reports.projection.words import findings, spares_said

    width = columns.width_of(sys.stdout)
    said = list(found.notes)
    table: list[str] = []
    if found.rows:
        rows = [HEAD, *(_row(found, row) for row in found.rows)]
        table = columns.table(rows, "rlrlrrrr", width=width, headed=True)
        said.append(f"failures: {found.failures_from}")
    said += [f"{name}: {cost.source}" for name, cost in found.costs.items()]
    without = dict.fromkeys((row.strategy, row.why) for row in found.rows if row.closed is None)
    said += [f"no formula for {name}: {why}" for name, why in without]
    said += [*findings(found), *spares_said(found)]
    return [
        *(folded for text in found.cautions for folded in columns.fold(f"caution: {text}", width)),
        *_compared_lines(found, width),
        *table,
        *(folded for text in said for folded in columns.fold(text, width)),
    ]


def _compared_lines(found: Projection, width: int | None) -> list[str]:
    if not found.compared:
        return []
    from trainchaos.reports.projection.words import compared_figures, compared_said

    within = ("OUTSIDE", "inside")
    rows = [COMPARED, *((*compared_figures(o), within[o.inside]) for o in found.compared)]
    return [
        *columns.table(rows, "rlrlrrlrl", width=width, headed=True),
        *columns.fold(compared_said(found), width),
        "",
    ]


def _row(found: Projection, row: Projected) -> tuple[str, ...]:
    from trainchaos.chaos.units import enclosing
    from trainchaos.reports.projection.words import named

    return (
        f"{row.gpus}",
        named(found, row.strategy),
        f"{row.goodput:.4f}",
        " to ".join(enclosing(row.low, row.high, decimals=4)),
        "-" if row.closed is None else f"{row.closed:.4f}",
        f"{row.failures:.1f}",
        f"{row.lost_gpu_hours:.0f} GPU-h",
        f"{row.second_gpu_hours:.3g} GPU-h",
    )


@contextmanager
def _progress(quiet: bool, what: str) -> Iterator[Callable[[float], None]]:
    """Told the share that is done: a bar on a terminal's standard error, elsewhere a line now and
    then.
    """
    if quiet:
        yield lambda share: None
        return
    if not sys.stderr.isatty():
        yield _lines_of(what)
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=1.0)

    def told(share: float) -> None:
        bar.start()  # not before, so that processes are forked before the bar has its thread
        bar.update(task, completed=share)

    try:
        yield told
    finally:
        bar.stop()


def _lines_of(what: str) -> Callable[[float], None]:
    """Writes a line each ``TOLD_S``."""
    last_s = time.monotonic()

    def told(share: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= TOLD_S:
            last_s = time.monotonic()
            say(f"{what}: {share:.0%}", err=True)

    return told


COMMANDS = [project]
