"""Cost of `determinism: elastic`: step times against the default, with alternating steps in the
same processes.

    python -m benchmarks.elastic [--pairs 100]

gpt nano, 4 ranks over gloo, global batch 24; then the same with 3 of the 4 ranks. Each pair of
steps, in alternating order, gives one ratio; a step lasts from its first load to the end of the
optimizer, on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import torch

from trainchaos.harness.launch.workload import BuildContext, Trainable
from trainchaos.harness.workloads.gpt import Gpt
from trainchaos.recovery.collectives.elastic import ElasticReducer
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.reduce import GradientReducer, Reducer
from trainchaos.recovery.data import order
from trainchaos.recovery.process.local import start_store

RANKS, BATCH, WARM_UP, LIMIT_S = 4, 24, 10, 60.0
WORLDS = (RANKS, RANKS - 1)


def rank_times(rank: int, port: int, corpus: Path, pairs: int) -> list[list[list[float]]]:
    """For each world that includes this rank: seconds of each default step, and of each elastic
    step.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    trainable = Gpt().build(BuildContext(data=corpus, device="cpu", seed=1, steps=4 * pairs))
    plain = GradientReducer(trainable.model, max_world=RANKS, entering=lambda _: None)
    elastic = ElasticReducer(trainable.model, max_world=RANKS, entering=lambda _: None)
    samples = (corpus.stat().st_size - 1) // 64
    found = []
    for generation, world in enumerate(WORLDS, start=1):
        if rank >= world:
            break
        group = Group(
            generation=generation,
            rank=rank,
            world=world,
            store_port=port,
            backend="gloo",
            timeout_s=LIMIT_S,
            check=lambda: None,
        )
        group.form()
        times: list[list[float]] = [[], []]
        for reducer in (plain, elastic):
            reducer.new_generation(group)
        for number in range(1, WARM_UP + pairs + 1):
            ids = order.batch(number, BATCH, samples, 1)
            for mode in (0, 1) if number % 2 else (1, 0):
                seconds = _step(trainable, (plain, elastic)[mode], group, ids, elastic=bool(mode))
                if number > WARM_UP:
                    times[mode].append(seconds)
        group.leave()
        found.append(times)
    return found


def _step(
    trainable: Trainable, reducer: Reducer, group: Group, ids: list[int], *, elastic: bool
) -> float:
    micros = order.micro_batches(
        ids, rank=group.rank, world=group.world, full=RANKS, elastic=elastic
    )
    started = time.perf_counter()
    reducer.begin()
    for micro in micros:
        loss = trainable.loss(trainable.load(micro.samples))
        value = float(loss.detach())
        reducer.expect()
        loss.backward()  # type: ignore[no-untyped-call]
        if micro is not micros[-1]:
            reducer.keep(rank=group.rank, loss_sum=value, count=micro.count)
    reduced = reducer.finish(rank=group.rank, loss_sum=value, count=micro.count)
    reducer.clip(reduced.grad_norm, trainable.clip_norm)
    trainable.optimizer.step()
    return time.perf_counter() - started


def measured(pairs: int) -> list[list[list[list[float]]]]:
    """``rank_times`` of every rank."""
    _store, port = start_store()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with TemporaryDirectory() as folder:
        corpus = Gpt().prepare(Path(folder)).path
        command = [
            sys.executable,
            "-m",
            "benchmarks.elastic",
            "--pairs",
            str(pairs),
            "--corpus",
            str(corpus),
        ]
        children = [
            subprocess.Popen(
                [*command, "--port", str(port), "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        try:
            return [
                json.loads(child.communicate(timeout=pairs * 10 + LIMIT_S)[0]) for child in children
            ]
        finally:
            for child in children:
                child.kill()


def main() -> None:
    """Measure and print; with ``--rank``, be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=100)
    for name, kind in (("--rank", int), ("--port", int), ("--corpus", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(
            json.dumps(rank_times(options.rank, options.port, options.corpus, options.pairs)),
            flush=True,
        )
        os._exit(0)
    times = measured(options.pairs)
    print(
        "| | n | default | elastic | ratio, median [quartiles] |\n| --- | --- | --- | --- | --- |"
    )
    for place, world in enumerate(WORLDS):
        there = [found[place] for found in times[:world]]
        plain, elastic = (
            [max(steps) for steps in zip(*(ranks[mode] for ranks in there), strict=True)]
            for mode in (0, 1)
        )
        ratios = [b / a for a, b in zip(plain, elastic, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        cells = " | ".join(f"{median(seconds) * 1e3:.1f} ms" for seconds in (plain, elastic))
        print(
            f"| {world} of {RANKS} ranks | {len(ratios)} | {cells} | {median(ratios):.3f}"
            f" [{low:.3f}, {high:.3f}] |"
        )


if __name__ == "__main__":
    main()
