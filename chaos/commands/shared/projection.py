"""Options of ``chaos project``, a row each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainchaos.chaos.commands.shared.options import FLAG, PATH, RUN, option, together
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
LONGER = span(positive=True)
Row = tuple[str, Any, str] | tuple[str, Any, str, Any]
"""Name, type, help; and the default, if it has one."""


def whole(least: int, most: int | None = None) -> click.IntRange:
    """A whole number within bounds."""
    return click.IntRange(least, most)


ROWS: tuple[Row, ...] = (
    ("--preset", click.Choice(PRESETS), "How often nodes fail.  [default: mid]"),
    ("--rate", Finite(LEAST_RATE, MOST_RATE), "Instead: failures per 1,000 nodes and day."),
    ("--gpus-per-node", whole(1, 1024), "A node is lost, replaced and repaired as a whole.", 8),
    (
        "--process-share",
        Finite(0, 1),
        "Failures that end processes only, so that no node is repaired.  [default: as the preset's"
        " causes say, else 0]",
    ),
    (
        "--growth",
        span(),
        "What each doubling of the nodes adds to a recovery.  [default: 0s if measured]",
    ),
    ("--step", LONGER, "A step.  [default: 20s]"),
    ("--save", span(), "A checkpoint holds up so long.  [default: 5s]"),
    ("--load", span(), "Loading a checkpoint.  [default: 120s]"),
    ("--checkpoint-size", SIZE, "With --bandwidth instead of --save and --load."),
    ("--bandwidth", SIZE_PER_S, "Of its storage, both ways: 40GB/s."),
    (
        "--times-of-runs",
        FLAG,
        "Step and save are those of --runs; loading is in their recoveries.",
    ),
    (
        "--batch",
        whole(1, 10**12),
        "Samples of a step, to count what is lost.  [default: steps are counted]",
    ),
    ("--interval", LONGER, "Between checkpoints.  [default: the best at each size]"),
    ("--replica-nodes", whole(1), "Nodes that hold one copy of the model.", 1),
    ("--spares", whole(0), "Spare nodes of hot-spare.", 2),
    ("--repair", LONGER, "Until a lost node is back.", "4h"),
    ("--repair-sigma", Finite(0, 10), "Of the logarithm of repair times.", 0.0),
    (
        "--weibull",
        Finite(0.1, 10),
        "Shape of the times between failures.  [default: a constant rate]",
    ),
    ("--trace", PATH, "Failures that were seen: .csv or .jsonl of times."),
    (
        "--trace-nodes",
        whole(1, MOST_GPUS),
        "Nodes that the trace is of, for its rate.  [default: only its shape counts]",
    ),
    ("--lemons", LEMON_SHARE, "Share of nodes that fail so many times as often."),
    (
        "--quarantine",
        whole(1, 100),
        "Failures after which a lemon is not used again.  [default: never]",
    ),
    (
        "--slow-rate",
        Finite(0, MOST_RATE),
        "Nodes that become slow, per 1,000 nodes and day.",
        0.0,
    ),
    (
        "--slow-factor",
        Finite(1, 1000),
        "How much longer the job takes with a slow node.  [default: 1.34]",
    ),
    ("--slow-found", span(), "Until a slow node is found.  [default: never]"),
    (
        "--availability",
        Finite(0, 1, min_open=True, max_open=True),
        "Say how many spares keep all nodes there for this share of the time.",
    ),
    (
        "--several",
        SHARES,
        "Probabilities that 1, 2, ... nodes fail at once.  [default: the trace's, else 1]",
    ),
    (
        "--failures-while",
        click.Choice(["running", "always"]),
        "Whether failures also come during recoveries.",
        "running",
    ),
    (
        "--spares-count/--spares-free",
        None,
        "Whether spare nodes are in the denominator of goodput.",
        True,
    ),
    (
        "--rework",
        click.Choice(["apart", "recovery", "useful"]),
        "Work done again is a class of its own, part of the recovery, or useful.",
        "apart",
    ),
    (
        "--missing",
        click.Choice(["lost", "useful"]),
        "Samples of missing nodes are not useful, or a step without them is a whole one.",
        "lost",
    ),
    ("--price", Finite(0, 1e9), "Of a GPU-hour."),
    ("--days", Finite(0.01, 36_500), "Length of the job.", 90.0),
    ("--trials", whole(2, 1_000_000), "Simulated jobs of each size and strategy.", 1000),
    ("--seed", whole(0), "Of the simulation.", 0),
    (
        "--jobs",
        whole(1, 1024),
        "Processes; the figures do not depend on them.  [default: one a core]",
    ),
    ("--into", PATH, "Directory for results.json and report.html.", Path("projection")),
)
SEVERAL: tuple[tuple[str, str, Any, str], ...] = (
    ("--runs", "runs", RUN, "Measured runs; repeatable."),
    (
        "--compare",
        "compare",
        RUN,
        "Set projected goodput of these runs' own jobs beside what they measured; repeatable.",
    ),
    (
        "--gpus",
        "gpus",
        whole(1, MOST_GPUS),
        f"Sizes; repeatable.  [default: powers of two to {LARGEST}]",
    ),
    ("--strategy", "strategies", None, "Only these."),
    ("--stall", "stalls", STALL, "What a recovery takes; repeatable."),
    (
        "--cause",
        "causes",
        CAUSE_SHARE,
        "A cause's share of the failures, and what a recovery from it takes; NAME=:DURATION for a"
        " cause that the preset or trace counts; repeatable.",
    ),
)
"""Those that may be repeated: name, parameter, type, help."""


options = together(
    *(
        option(f"{name} {to}", kind, text, multiple=True, metavar=None if kind else "NAME")
        for name, to, kind, text in SEVERAL
    ),
    *(option(*row) for row in ROWS),
)
"""All of them on a command."""
