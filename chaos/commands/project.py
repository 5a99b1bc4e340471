"""``chaos project``: what the recoveries of a small run mean for a cluster of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import columns, errors
from trainchaos.chaos.commands.shared.options import FORMAT, PATH, RUN
from trainchaos.chaos.commands.shared.say import say

if TYPE_CHECKING:
    from trainchaos.harness.judge.results import Results
    from trainchaos.harness.projection.costs import RecoveryCost
    from trainchaos.harness.projection.result import Projected, Projection, Setting

PRESETS = ("low", "mid", "high", "llama3", "byterobust")
SMALLEST, LARGEST = 8, 131_072
MOST_GPUS = 10_000_000
HEAD = ("GPUs", "strategy", "goodput", "95 % of the mean", "formula", "failures", "lost")


class Span(click.ParamType):
    """A duration: ``90s``, ``4h``; its value in seconds. ``positive``: longer than nothing."""

    name = "duration"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds. Fails at anything else."""
        from trainchaos.chaos.scenario.sla import ClauseError, parse_duration

        try:
            seconds = parse_duration(value)
        except ClauseError as error:
            self.fail(str(error), param, ctx)
        if self._positive and not seconds > 0:
            self.fail(f"{value} is no time: write more than 0s", param, ctx)
        return seconds


class Stall(click.ParamType):
    """``hot-spare=20s``: how long a strategy's recovery takes, without work done again."""

    name = "strategy=duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        """The name and seconds. Fails at anything else."""
        if isinstance(value, tuple):
            return value
        name, _, text = str(value).partition("=")
        if not text:
            self.fail(f"{value!r} is not STRATEGY=DURATION, such as hot-spare=20s", param, ctx)
        return name, Span().convert(text, param, ctx)


class Shares(click.ParamType):
    """``0.96,0.03,0.01``: probabilities that sum to 1."""

    name = "probabilities"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Fails unless they are, and sum to 1."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 0.96,0.04", param, ctx)
        if any(one < 0 for one in found) or abs(sum(found) - 1.0) > 1e-9:
            self.fail(f"{value} are no probabilities that sum to 1", param, ctx)
        return found


_OPTIONS = (
    click.option("--runs", "runs", type=RUN, multiple=True, help="Measured runs; repeatable."),
    click.option(
        "--preset", type=click.Choice(PRESETS), help="How often nodes fail.  [default: mid]"
    ),
    click.option(
        "--rate",
        type=click.FloatRange(0, min_open=True),
        help="Instead: failures per 1,000 nodes and day.",
    ),
    click.option(
        "--gpus",
        type=click.IntRange(1, MOST_GPUS),
        multiple=True,
        help=f"Sizes; repeatable.  [default: powers of two to {LARGEST}]",
    ),
    click.option(
        "--gpus-per-node",
        type=click.IntRange(1, 1024),
        default=8,
        show_default=True,
        help="A node is lost, replaced and repaired as a whole.",
    ),
    click.option("--strategy", "strategies", multiple=True, metavar="NAME", help="Only these."),
    click.option(
        "--stall", "stalls", type=Stall(), multiple=True, help="What a recovery takes; repeatable."
    ),
    click.option(
        "--growth",
        type=Span(),
        help="What each doubling of the nodes adds to a recovery.  [default: 0s if measured]",
    ),
    click.option(
        "--step", type=Span(positive=True), default="20s", show_default=True, help="A step."
    ),
    click.option(
        "--save",
        type=Span(),
        default="5s",
        show_default=True,
        help="A checkpoint holds up so long.",
    ),
    click.option(
        "--load", type=Span(), default="120s", show_default=True, help="Loading a checkpoint."
    ),
    click.option(
        "--interval",
        type=Span(positive=True),
        help="Between checkpoints.  [default: the best at each size]",
    ),
    click.option(
        "--replica-nodes",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Nodes that hold one copy of the model.",
    ),
    click.option(
        "--spares",
        type=click.IntRange(0),
        default=2,
        show_default=True,
        help="Spare nodes of hot-spare.",
    ),
    click.option(
        "--repair",
        type=Span(positive=True),
        default="4h",
        show_default=True,
        help="Until a lost node is back.",
    ),
    click.option(
        "--repair-sigma",
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        help="Of the logarithm of repair times.",
    ),
    click.option(
        "--weibull",
        type=click.FloatRange(0.1, 10),
        help="Shape of the times between failures.  [default: a constant rate]",
    ),
    click.option(
        "--several",
        type=Shares(),
        default="1",
        help="Probabilities that 1, 2, ... nodes fail at once.",
    ),
    click.option(
        "--failures-while",
        type=click.Choice(["running", "always"]),
        default="running",
        show_default=True,
        help="Whether failures also come during recoveries.",
    ),
    click.option(
        "--spares-count/--spares-free",
        default=True,
        show_default=True,
        help="Whether spare nodes are in the denominator of goodput.",
    ),
    click.option("--price", type=click.FloatRange(0), help="Of a GPU-hour."),
    click.option(
        "--days",
        type=click.FloatRange(0, 36_500, min_open=True),
        default=90.0,
        show_default=True,
        help="Length of the job.",
    ),
    click.option(
        "--trials",
        type=click.IntRange(2, 1_000_000),
        default=1000,
        show_default=True,
        help="Simulated jobs of each size and strategy.",
    ),
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the simulation."
    ),
    click.option(
        "--into",
        type=PATH,
        default=Path("projection"),
        show_default=True,
        help="Directory for results.json and report.html.",
    ),
)


def _options(command: Any) -> Any:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_options
@FORMAT
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def project(form: str, quiet: bool, into: Path, **choices: Any) -> int:
    """Project goodput, lost time and money to clusters of any size, for each strategy, from the
    recoveries that runs measured or from given ones; see docs/projection.md.

    Formulas and an event simulation are set beside each other wherever both apply.
    """
    from trainchaos.harness.projection import projection
    from trainchaos.harness.projection.presets import PRESETS as KNOWN
    from trainchaos.reports.projection import page

    if choices["preset"] and choices["rate"]:
        raise click.UsageError("--preset and --rate both say how often nodes fail")
    preset = KNOWN[choices["preset"] or "mid"]
    costs = _costs(choices)
    setting = _setting(choices, choices["rate"] or preset.rate)
    with _progress(quiet) as each:
        try:
            found = projection.project(
                setting, costs, projection.said_from(preset, choices["rate"]), each
            )
        except MemoryError as error:
            raise errors.ScenarioError("not enough memory", hint="fewer --trials") from error
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
    width = columns.width_of(sys.stdout)
    rows: list[tuple[str, ...]] = [HEAD]
    for row in found.rows:
        rows.append(_row(row))
    said = [*found.notes, f"failures: {found.failures_from}"]
    said += [f"{name}: {source}" for name, source in found.costs.items()]
    without = dict.fromkeys((row.strategy, row.why) for row in found.rows if row.closed is None)
    said += [f"no formula for {name}: {why}" for name, why in without]
    return [
        *(folded for text in found.cautions for folded in columns.fold(f"caution: {text}", width)),
        *columns.table(rows, "rlrlrrr", width=width, headed=True),
        *(folded for text in said for folded in columns.fold(text, width)),
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


def _costs(choices: dict[str, Any]) -> dict[str, RecoveryCost]:
    from dataclasses import replace

    from trainchaos.harness.projection.costs import PUBLISHED, measured
    from trainchaos.harness.projection.simulate import Duration

    found = measured(_results(choices["runs"])) if choices["runs"] else dict(PUBLISHED)
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
    if wanted := choices["strategies"]:
        if missing := [name for name in wanted if name not in found]:
            raise click.UsageError(f"no costs of {missing[0]}: there are {', '.join(found)}")
        found = {name: one for name, one in found.items() if name in wanted}
    return found


def _results(runs: Sequence[Path]) -> Iterable[Results]:
    from trainchaos.harness.host.rundir import open_run
    from trainchaos.harness.judge.verdict.judge import judge

    found = []
    for path in runs:
        results = judge(open_run(path))
        broken = [
            arm.id
            for arm in results.arms
            if (log := arm.invariants.get("evidence-complete")) is not None
            and log.verdict != "pass"
        ]
        if broken or not results.arms:
            raise errors.ScenarioError(
                f"{path}: the log of {broken[0] if broken else 'every arm'} is not whole",
                hint="give a run that chaos analyze does not find fault with",
            )
        found.append(results)
    if len({one.scenario for one in found}) > 1:
        names = ", ".join(sorted({one.scenario for one in found}))
        raise errors.ScenarioError(
            f"the runs are of different scenarios: {names}", hint="project them one by one"
        )
    return found


def _setting(choices: dict[str, Any], rate: float) -> Setting:
    from trainchaos.harness.projection.projection import sizes
    from trainchaos.harness.projection.result import Definitions, Setting

    most_spared = choices["spares"] * choices["gpus_per_node"]
    return Setting(
        gpus=choices["gpus"] or sizes(max(SMALLEST, most_spared), LARGEST),
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
        several=choices["several"],
        spares=choices["spares"],
        repair_s=choices["repair"],
        repair_sigma=choices["repair_sigma"],
        price=choices["price"],
        definitions=Definitions(
            failures_while=choices["failures_while"], spares_count=choices["spares_count"]
        ),
    )


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal's standard error, told the share that is done."""
    if quiet or not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("projecting", total=1.0)
        yield lambda share: bar.update(task, completed=share)


COMMANDS = [project]
