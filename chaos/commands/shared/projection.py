"""Options of ``chaos project``, and the types of their values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from trainchaos.chaos.commands.shared.options import PATH, RUN

PRESETS = ("low", "mid", "high", "llama3", "byterobust")
SMALLEST, LARGEST = 8, 131_072
MOST_GPUS = 10_000_000
MOST_RATE = 1e4  # ten failures of each node a day


class Finite(click.FloatRange):
    """A number within bounds: neither infinite nor none at all, which compares with no bound."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number. Fails at anything else."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


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
        if not all(one >= 0 for one in found) or abs(sum(found) - 1.0) > 1e-9:
            self.fail(f"{value} are no probabilities that sum to 1", param, ctx)
        return found


class CauseShare(click.ParamType):
    """``hardware=0.6:6m`` or ``hardware=0.6``: a cause's share of the failures, and what a recovery
    from it takes.
    """

    name = "name=share[:duration]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float, float | None]:
        """The name, the share, and seconds or None. Fails at anything else."""
        if isinstance(value, tuple):
            return value
        name, _, rest = str(value).partition("=")
        share, colon, text = rest.partition(":")
        number = _number(share)
        if not name or number is None or not 0 < number <= 1:
            self.fail(f"{value!r} is not NAME=SHARE:DURATION, such as hardware=0.6:6m", param, ctx)
        return name, number, Span().convert(text, param, ctx) if colon else None


class LemonShare(click.ParamType):
    """``0.05:10``: a twentieth of the nodes fails ten times as often."""

    name = "share:times"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float]:
        """Both. Fails at anything else."""
        if isinstance(value, tuple):
            return value
        share, _, times = str(value).partition(":")
        first, second = _number(share), _number(times)
        if first is None or second is None or not (0 <= first <= 1 and 0 < second <= 1e6):
            self.fail(f"{value!r} is not SHARE:TIMES, such as 0.05:10", param, ctx)
        return first, second


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


OPTIONS = (
    click.option("--runs", "runs", type=RUN, multiple=True, help="Measured runs; repeatable."),
    click.option(
        "--compare",
        type=RUN,
        multiple=True,
        help="Set projected goodput of these runs' own jobs beside what they measured; repeatable.",
    ),
    click.option(
        "--preset", type=click.Choice(PRESETS), help="How often nodes fail.  [default: mid]"
    ),
    click.option(
        "--rate",
        type=Finite(0, MOST_RATE, min_open=True),
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
        "--cause",
        "causes",
        type=CauseShare(),
        multiple=True,
        help="A cause's share of the failures, and what a recovery from it takes; repeatable.",
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
        type=Finite(0, 10),
        default=0.0,
        show_default=True,
        help="Of the logarithm of repair times.",
    ),
    click.option(
        "--weibull",
        type=Finite(0.1, 10),
        help="Shape of the times between failures.  [default: a constant rate]",
    ),
    click.option("--trace", type=PATH, help="Failures that were seen: .csv or .jsonl of times."),
    click.option(
        "--trace-nodes",
        type=click.IntRange(1, MOST_GPUS),
        help="Nodes that the trace is of, for its rate.  [default: only its shape counts]",
    ),
    click.option(
        "--lemons", type=LemonShare(), help="Share of nodes that fail so many times as often."
    ),
    click.option(
        "--quarantine",
        type=click.IntRange(1, 100),
        help="Failures after which a lemon is not used again.  [default: never]",
    ),
    click.option(
        "--slow-rate",
        type=Finite(0, MOST_RATE),
        default=0.0,
        show_default=True,
        help="Nodes that become slow, per 1,000 nodes and day.",
    ),
    click.option(
        "--slow-factor",
        type=Finite(1, 1000),
        default=1.34,
        show_default=True,
        help="How much longer the job takes with a slow node.",
    ),
    click.option("--slow-found", type=Span(), help="Until a slow node is found.  [default: never]"),
    click.option(
        "--availability",
        type=Finite(0, 1, min_open=True, max_open=True),
        help="Say how many spares keep all nodes there for this share of the time.",
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
    click.option("--price", type=Finite(0, 1e9), help="Of a GPU-hour."),
    click.option(
        "--days",
        type=Finite(0, 36_500, min_open=True),
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
        "--jobs",
        type=click.IntRange(1, 1024),
        help="Processes; the figures do not depend on them.  [default: one a core]",
    ),
    click.option(
        "--into",
        type=PATH,
        default=Path("projection"),
        show_default=True,
        help="Directory for results.json and report.html.",
    ),
)


def options(command: Any) -> Any:
    """All of them on a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
