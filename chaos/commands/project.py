"""``chaos project``: what the recoveries of a small run mean for a cluster of any size."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import columns, errors
from trainchaos.chaos.commands.shared.options import FORMAT
from trainchaos.chaos.commands.shared.projection import LARGEST, SMALLEST, options
from trainchaos.chaos.commands.shared.say import say

if TYPE_CHECKING:
    from trainchaos.harness.projection.costs import RecoveryCost
    from trainchaos.harness.projection.observed import Stored
    from trainchaos.harness.projection.result import Projected, Projection, Setting
    from trainchaos.harness.projection.traces import FailureTrace

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
HEAD = ("GPUs", "strategy", "goodput", "mean, 95 % interval", "formula", "failures", "lost")


@click.command()
@options
@FORMAT
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def project(form: str, quiet: bool, into: Path, **choices: Any) -> int:
    """Project goodput, lost time and money to clusters of any size, for each strategy, from the
    recoveries that runs measured or from given ones; see docs/projection.md.

    Formulas and an event simulation are set beside each other wherever both apply.
    """
    from trainchaos.harness.projection import projection
    from trainchaos.harness.projection.compare import compare
    from trainchaos.harness.projection.observed import read_stored
    from trainchaos.harness.projection.presets import PRESETS as KNOWN
    from trainchaos.harness.projection.presets import rate_of
    from trainchaos.reports.projection import page

    if choices["preset"] and choices["rate"]:
        raise click.UsageError("--preset and --rate both say how often nodes fail")
    preset = KNOWN[choices["preset"] or "mid"]
    jobs = choices["jobs"] or len(os.sched_getaffinity(0))
    with _progress(quiet, "judging --runs") as each:
        runs = read_stored(choices["runs"], each, jobs)
    with _progress(quiet, "judging --compare") as each:
        asked = read_stored(choices["compare"], each, jobs)
    costs = _costs(choices, runs)
    trace = _trace(choices)
    each_has = choices["gpus_per_node"]
    rate = choices["rate"] or rate_of(preset, each_has)
    said = projection.said_from(preset, choices["rate"], each_has)
    if trace:
        rate, said = _of_trace(trace, choices, rate, said)
    setting = _setting(choices, rate, trace)
    with _progress(quiet, "projecting") as each:
        try:
            found = projection.project(setting, costs, said, each, jobs)
        except MemoryError as error:
            raise errors.ScenarioError("not enough memory", hint="fewer --trials") from error
    if asked:
        compared, cautions = compare(asked, runs, choices["seed"])
        cautions = [*cautions, *found.cautions]
        found = found.model_copy(update={"compared": compared, "cautions": cautions})
    page.write(found, into)
    if form == "json":
        say(found.model_dump_json(indent=2))
    else:
        for line in lines(found):
            say(line)
        say(f"report  {into / page.NAME}")
    return errors.EXIT_PASS


def lines(found: Projection) -> list[str]:
    """For a terminal: a table for each size, and what the figures rest on."""
    from trainchaos.reports.projection.words import findings

    width = columns.width_of(sys.stdout)
    rows: list[tuple[str, ...]] = [HEAD]
    for row in found.rows:
        rows.append(_row(row))
    said = [*found.notes, f"failures: {found.failures_from}"]
    said += [f"{name}: {source}" for name, source in found.costs.items()]
    without = dict.fromkeys((row.strategy, row.why) for row in found.rows if row.closed is None)
    said += [f"no formula for {name}: {why}" for name, why in without]
    said += findings(found)
    return [
        *(folded for text in found.cautions for folded in columns.fold(f"caution: {text}", width)),
        *_compared_lines(found, width),
        *columns.table(rows, "rlrlrrr", width=width, headed=True),
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


def _row(row: Projected) -> tuple[str, ...]:
    return (
        f"{row.gpus}",
        row.strategy,
        f"{row.goodput:.4f}",
        f"{row.low:.4f} to {row.high:.4f}",
        "-" if row.closed is None else f"{row.closed:.4f}",
        f"{row.failures:.1f}",
        f"{row.lost_gpu_hours:.0f} GPU-h",
    )


def _costs(choices: dict[str, Any], runs: Sequence[Stored]) -> dict[str, RecoveryCost]:
    from dataclasses import replace

    from trainchaos.harness.projection.costs import PUBLISHED, Cause, by_cause, measured
    from trainchaos.harness.projection.durations import Duration

    found = measured(one.results for one in runs) if runs else dict(PUBLISHED)
    for name, seconds in choices["stalls"]:
        if name not in PUBLISHED:
            raise click.UsageError(f"--stall: no strategy {name}: {', '.join(PUBLISHED)}")
        found[name] = replace(
            PUBLISHED[name],
            stall=Duration(median_s=seconds),
            nodes=1.0,
            per_doubling_s=0.0,
            source=f"{seconds:g} s, as given",
        )
    if choices["growth"] is not None:
        found = {n: replace(one, per_doubling_s=choices["growth"]) for n, one in found.items()}
    if choices["causes"]:
        causes = [Cause(name=n, share=s, stall_s=t) for n, s, t in choices["causes"]]
        found = {n: by_cause(one, causes) for n, one in found.items()}
    if wanted := choices["strategies"]:
        if missing := [name for name in wanted if name not in found]:
            raise click.UsageError(f"no costs of {missing[0]}: there are {', '.join(found)}")
        found = {name: one for name, one in found.items() if name in wanted}
    return found


def _trace(choices: dict[str, Any]) -> FailureTrace | None:
    from trainchaos.harness.projection.traces import read_failures

    if choices["trace"] is None:
        if choices["trace_nodes"]:
            raise click.UsageError("--trace-nodes says of how many nodes a --trace is")
        return None
    if choices["weibull"]:
        raise click.UsageError("--trace and --weibull both say how failures follow one another")
    if choices["trace_nodes"] and (choices["rate"] or choices["preset"]):
        raise click.UsageError("--trace-nodes gives the rate that --rate or --preset gives too")
    return read_failures(choices["trace"])


def _of_trace(
    trace: FailureTrace, choices: dict[str, Any], rate: float, said: str
) -> tuple[float, str]:
    """The rate, and where it is from."""
    from trainchaos.harness.projection.presets import DAY_S

    shape = f"{len(trace.gaps_s) + 1} failures of {choices['trace']}, drawn again one by one"
    if nodes := choices["trace_nodes"]:
        rate = DAY_S * 1000.0 / (trace.mean_s * nodes)
        said = f"{rate:.3g} failures per 1,000 nodes and day, and their gaps, from {shape}"
    else:
        said = f"{said}; their gaps from {shape}"
    if trace.causes:
        total = sum(trace.causes.values())
        each = (f"{name} {count / total:.1%}" for name, count in trace.causes.items())
        said = f"{said}; causes: {', '.join(each)}"
    return rate, said


def _setting(choices: dict[str, Any], rate: float, trace: FailureTrace | None) -> Setting:
    from trainchaos.harness.projection.projection import sizes
    from trainchaos.harness.projection.result import Definitions, Setting

    several = choices["several"]
    if trace and several == (1.0,):
        several = trace.several
    lemon_share, lemon_times = choices["lemons"] or (0.0, 1.0)
    if choices["quarantine"] and not choices["lemons"]:
        raise click.UsageError("--quarantine is of --lemons: say how many there are")
    most_spared = choices["spares"] * choices["gpus_per_node"]
    return Setting(
        gpus=tuple(dict.fromkeys(choices["gpus"])) or sizes(max(SMALLEST, most_spared), LARGEST),
        gpus_per_node=choices["gpus_per_node"],
        rate=rate,
        days=choices["days"],
        trials=choices["trials"],
        seed=choices["seed"],
        save_s=choices["save"],
        load_s=choices["load"],
        interval_s=choices["interval"],
        step_s=choices["step"],
        replica_nodes=choices["replica_nodes"],
        weibull=choices["weibull"],
        several=several,
        gaps=trace.gaps_s if trace else (),
        lemon_share=lemon_share,
        lemon_times=lemon_times,
        quarantine=choices["quarantine"],
        slow_rate=choices["slow_rate"],
        slow_factor=choices["slow_factor"],
        slow_found_s=choices["slow_found"],
        availability=choices["availability"],
        spares=choices["spares"],
        repair_s=choices["repair"],
        repair_sigma=choices["repair_sigma"],
        price=choices["price"],
        definitions=Definitions(
            failures_while=choices["failures_while"], spares_count=choices["spares_count"]
        ),
    )


@contextmanager
def _progress(quiet: bool, what: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal's standard error, told the share that is done."""
    if quiet or not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    # begins with the first share, so that processes are forked before the bar has its thread
    begun: list[tuple[Progress, TaskID]] = []
    with ExitStack() as stack:

        def told(share: float) -> None:
            if not begun:
                bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
                begun.append((bar, bar.add_task(what, total=1.0)))
            bar, task = begun[0]
            bar.update(task, completed=share)

        yield told


COMMANDS = [project]
