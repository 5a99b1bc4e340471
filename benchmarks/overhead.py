"""Fault-free step time under recovery against the bare DistributedDataParallel loop of the same
model, or with ``--shards`` against a bare loop of FSDP2.

    python -m benchmarks.overhead [--rounds 5] [--steps 150] [--shards 2]

Both arms train the same gpt nano on the same data with the same optimizer at 4 ranks over gloo.
Rounds alternate which arm runs first; each round gives one ratio of median step times. The first 20
steps and steps with a checkpoint are excluded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.scenarios import play
from trainchaos.chaos.events.log import Kind, read_log
from trainchaos.harness.host.rundir import RunDirectory

RANKS, BATCH, SKIP, EVERY = 4, 16, 20, 25


def bare(steps: int, corpus: Path, shards: int) -> float:
    """Median step time of the bare loop, seconds: the slowest rank's."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.loops.bare_ddp" if shards == 1 else "benchmarks.loops.bare_fsdp",
                    folder,
                    str(rank),
                    str(RANKS),
                    str(steps),
                    str(corpus),
                    str(shards),
                ],
                env=environment,
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        try:
            outputs = [child.communicate(timeout=120)[0] for child in children]
        finally:
            for child in children:
                child.kill()
    return max(median(json.loads(output)[SKIP:]) for output in outputs)


def ours(steps: int, runs: Path, shards: int) -> tuple[float, RunDirectory]:
    """Median step time of the same training under drop-replica, seconds: the slowest rank's; and
    its run directory.
    """
    layout = (
        "ddp" if shards == 1 else f"{{hsdp: {{replicas: {RANKS // shards}, shards: {shards}}}}}"
    )
    text = f"""version: 1
name: bench-overhead
seed: 1
workload:
  {{kind: gpt, size: nano, ranks: {RANKS}, steps: {steps}, global_batch: {BATCH},
    parallelism: {layout}, checkpoint: {{every: {EVERY}}}}}
recovery: drop-replica
baseline: none
invariants: [evidence-complete]
"""
    results = play("overhead", text, runs)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    shards = options.shards
    _, first = ours(40, options.runs, shards)  # makes the corpus, warms caches
    corpus = first.root / "data" / "0" / "corpus.bin"
    ratios, bares, mine = [], [], []
    for number in range(options.rounds):
        if number % 2:
            b, m = bare(options.steps, corpus, shards), ours(options.steps, options.runs, shards)[0]
        else:
            m, b = ours(options.steps, options.runs, shards)[0], bare(options.steps, corpus, shards)
        bares.append(b)
        mine.append(m)
        ratios.append(m / b)
        print(
            f"round {number + 1}: bare {b * 1e3:.1f} ms, under recovery {m * 1e3:.1f} ms, ratio"
            f" {m / b:.3f}",
            flush=True,
        )
    loop = "bare DDP" if shards == 1 else "bare FSDP2"
    print(f"\n| | {loop} | under recovery | ratio | difference |\n| --- | --- | --- | --- | --- |")
    spread = f"{median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
    times = f"{median(bares) * 1e3:.1f} ms | {median(mine) * 1e3:.1f} ms"
    difference = f"{(median(mine) - median(bares)) * 1e3:+.1f} ms"
    print(f"| median of {options.rounds} rounds | {times} | {spread} | {difference} |")


if __name__ == "__main__":
    main()
