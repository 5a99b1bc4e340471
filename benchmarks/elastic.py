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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import RANKS, in_turns, markdown, options, ranks_of, ratios, spread
from trainchaos.harness.launch.workload import BuildContext, Trainable
from trainchaos.harness.workloads.gpt import Gpt
from trainchaos.recovery.collectives.elastic import ElasticReducer
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.reduce import GradientReducer, Reducer
from trainchaos.recovery.data import order
from trainchaos.recovery.process.local import start_store

BATCH, WARM_UP, LIMIT_S = 24, 10, 60.0
WORLDS = (RANKS, RANKS - 1)


def rank_times(rank: int, port: int, corpus: Path, pairs: int) -> list[dict[str, list[float]]]:
    """For each world that includes this rank: seconds of each default and each elastic step."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    trainable = Gpt().build(BuildContext(data=corpus, device="cpu", seed=1, steps=4 * pairs))
    reducers: dict[str, Reducer] = {
        "default": GradientReducer(trainable.model, max_world=RANKS, entering=lambda _: None),
        "elastic": ElasticReducer(trainable.model, max_world=RANKS, entering=lambda _: None),
    }
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
        for reducer in reducers.values():
            reducer.new_generation(group)
        numbers = iter(range(1, 2 * (WARM_UP + pairs) + 1))

        def step(mode: str, group: Group = group, numbers: Iterator[int] = numbers) -> None:
            ids = order.batch((next(numbers) + 1) // 2, BATCH, samples, 1)
            _step(trainable, reducers[mode], group, ids, elastic=mode == "elastic")

        found.append(
            in_turns({mode: partial(step, mode) for mode in reducers}, pairs, warm=WARM_UP)
        )
        group.leave()
    return found


def _step(
    trainable: Trainable, reducer: Reducer, group: Group, ids: list[int], *, elastic: bool
) -> None:
    micros = order.micro_batches(
        ids, rank=group.rank, world=group.world, full=RANKS, elastic=elastic
    )
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


def main() -> None:
    """Measure and print; with ``--rank``, be one rank."""
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    for name, kind in (("--rank", int), ("--port", int), ("--corpus", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(rank_times(given.rank, given.port, given.corpus, given.pairs)), flush=True)
        os._exit(0)
    _store, port = start_store()
    with TemporaryDirectory() as folder:
        corpus = Gpt().prepare(Path(folder)).path
        words = ["-m", "benchmarks.elastic", "--pairs", str(given.pairs), "--corpus", str(corpus)]
        commands = [[*words, "--port", str(port), "--rank", str(rank)] for rank in range(RANKS)]
        times = ranks_of(commands, given.pairs * 10 + LIMIT_S)
    rows = []
    for place, world in enumerate(WORLDS):
        there = [found[place] for found in times[:world]]
        slowest = {
            mode: [max(steps) for steps in zip(*(rank[mode] for rank in there), strict=True)]
            for mode in ("default", "elastic")
        }
        steps = [f"{median(values) * 1e3:.1f} ms" for values in slowest.values()]
        ratio = spread(ratios(slowest["elastic"], slowest["default"]))
        rows.append([f"{world} of {RANKS} ranks", given.pairs, *steps, ratio])
    print(markdown(["", "n", "default", "elastic", "ratio"], rows))


if __name__ == "__main__":
    main()
