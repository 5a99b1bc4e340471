"""Options of ``chaos project``."""

from __future__ import annotations

from pathlib import Path

import click

from trainchaos.chaos.commands.shared.options import PATH, RUN, together
from trainchaos.chaos.commands.shared.quantities import (
    CAUSE_SHARE,
    LEMON_SHARE,
    SHARES,
    SIZE,
    SIZE_PER_S,
    STALL,
    Finite,
    span,
)

PRESETS = ("low", "mid", "high", "llama3", "byterobust")
LARGEST = 131_072
MOST_GPUS = 10_000_000
LEAST_RATE = 1e-6  # a failure of a thousand nodes in 2,700 years
MOST_RATE = 1e4  # ten failures of each node a day


options = together(
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
        type=Finite(LEAST_RATE, MOST_RATE),
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
        "--stall", "stalls", type=STALL, multiple=True, help="What a recovery takes; repeatable."
    ),
    click.option(
        "--cause",
        "causes",
        type=CAUSE_SHARE,
        multiple=True,
        help="A cause's share of the failures, and what a recovery from it takes; NAME=:DURATION"
        " for a cause that the preset or trace counts; repeatable.",
    ),
    click.option(
        "--process-share",
        type=Finite(0, 1),
        help="Failures that end processes only, so that no node is repaired.  [default: as the"
        " preset's causes say, else 0]",
    ),
    click.option(
        "--growth",
        type=span(),
        help="What each doubling of the nodes adds to a recovery.  [default: 0s if measured]",
    ),
    click.option("--step", type=span(positive=True), help="A step.  [default: 20s]"),
    click.option("--save", type=span(), help="A checkpoint holds up so long.  [default: 5s]"),
    click.option("--load", type=span(), help="Loading a checkpoint.  [default: 120s]"),
    click.option(
        "--checkpoint-size", type=SIZE, help="With --bandwidth instead of --save and --load."
    ),
    click.option("--bandwidth", type=SIZE_PER_S, help="Of its storage, both ways: 40GB/s."),
    click.option(
        "--times-of-runs",
        is_flag=True,
        help="Step and save are those of --runs; loading is in their recoveries.",
    ),
    click.option(
        "--batch",
        type=click.IntRange(1, 10**12),
        help="Samples of a step, to count what is lost.  [default: steps are counted]",
    ),
    click.option(
        "--interval",
        type=span(positive=True),
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
        type=span(positive=True),
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
        "--lemons", type=LEMON_SHARE, help="Share of nodes that fail so many times as often."
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
        help="How much longer the job takes with a slow node.  [default: 1.34]",
    ),
    click.option("--slow-found", type=span(), help="Until a slow node is found.  [default: never]"),
    click.option(
        "--availability",
        type=Finite(0, 1, min_open=True, max_open=True),
        help="Say how many spares keep all nodes there for this share of the time.",
    ),
    click.option(
        "--several",
        type=SHARES,
        help="Probabilities that 1, 2, ... nodes fail at once.  [default: the trace's, else 1]",
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
    click.option(
        "--rework",
        type=click.Choice(["apart", "recovery", "useful"]),
        default="apart",
        show_default=True,
        help="Work done again is a class of its own, part of the recovery, or useful.",
    ),
    click.option(
        "--missing",
        type=click.Choice(["lost", "useful"]),
        default="lost",
        show_default=True,
        help="Samples of missing nodes are not useful, or a step without them is a whole one.",
    ),
    click.option("--price", type=Finite(0, 1e9), help="Of a GPU-hour."),
    click.option(
        "--days",
        type=Finite(0.01, 36_500),
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
"""All of them on a command."""
