"""Fault-free step time under recovery against the bare DistributedDataParallel loop of the same
model, or with ``--shards`` against a bare loop of FSDP2.

    python -m benchmarks.overhead [--rounds 5] [--steps 150] [--shards 2]

Both arms train the same gpt nano on the same data with the same optimizer at 4 ranks over gloo.
Rounds alternate which arm runs first; each round gives one ratio of median step times. The first 20
steps and steps with a checkpoint are excluded.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    RANKS,
    in_turns,
    job,
    markdown,
    options,
    play,
    ranks_of,
    ratios,
    spread,
)
from trainchaos.chaos.events.log import Kind, read_log
from trainchaos.harness.host.rundir import RunDirectory

SKIP, EVERY = 20, 25


def bare(steps: int, corpus: Path, shards: int) -> float:
    """Median step time of the bare loop, seconds: the slowest rank's."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(RANKS), str(steps), str(corpus), str(shards)]
        loop = ["-m", "benchmarks.loops.bare", folder]
        times = ranks_of([[*loop, str(rank), *words] for rank in range(RANKS)], 120)
    return max(median(taken[SKIP:]) for taken in times)


def ours(steps: int, runs: Path, shards: int) -> tuple[float, RunDirectory]:
    """Median step time of the same training under drop-replica, seconds: the slowest rank's; and
    its run directory.
    """
    layout = "ddp" if shards == 1 else {"hsdp": {"replicas": RANKS // shards, "shards": shards}}
    shape = {"parallelism": layout, "checkpoint": {"every": EVERY}}
    about = {"recovery": "drop-replica", "invariants": ["evidence-complete"]}
    results = play("overhead", job("bench-overhead", 1, steps=steps, workload=shape, **about), runs)
    run = RunDirectory(runs / results.scenario / results.run_id)
    times: dict[str, list[tuple[int, int]]] = {}
    for event in read_log(run.events(run.arms()[0])).of(Kind.STEP_COMMITTED):
        times.setdefault(event.actor, []).append((event.step or 0, event.time_ns))
    return max(median(_gaps(found)) for found in times.values()), run


def _gaps(commits: list[tuple[int, int]]) -> list[float]:
    """Seconds between commits, without the first steps and steps after a checkpoint."""
    pairs = itertools.pairwise(commits)
    return [(b - a) / 1e9 for (_, a), (step, b) in pairs if step > SKIP and (step - 1) % EVERY]


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, runs="runs/bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    runs, shards = given.runs, given.shards
    _, first = ours(40, runs, shards)  # makes the corpus, warms caches
    corpus = first.root / "data" / "0" / "corpus.bin"
    found = in_turns(
        {
            "ours": lambda: ours(given.steps, runs, shards)[0],
            "bare": lambda: bare(given.steps, corpus, shards),
        },
        given.rounds,
    )
    mine, theirs = found["ours"], found["bare"]
    times = [f"{median(values) * 1e3:.1f} ms" for values in (theirs, mine)]
    difference = f"{(median(mine) - median(theirs)) * 1e3:+.1f} ms"
    loop = "bare DDP" if shards == 1 else "bare FSDP2"
    row = [f"median of {given.rounds} rounds", *times, spread(ratios(mine, theirs)), difference]
    print(markdown(["", loop, "under recovery", "ratio", "difference"], [row]))


if __name__ == "__main__":
    main()
