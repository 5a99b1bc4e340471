"""Whether ``adaptive`` loses least: fault mixes x costs x strategies in simulation, goodput as the
judge computes it, paired by seed.

    python -m benchmarks.adaptive [--seeds 10] [--ranks 6] [--mixes a;b] [--costs a;b]
        [--runs runs/bench] [--save FILE] [--jobs 1]
    python -m benchmarks.adaptive --spare --mixes a --costs b --save FILE
    python -m benchmarks.adaptive --table FILE

Deterministic: a seed draws steps and ranks of the faults, the simulator does the rest in its own
time. Goodput counts waiting spares as provisioned, and is 0 where a job did not complete
(docs/metrics.md). ``--save`` keeps the values, one JSON line each, so that a sweep may go on where
it was stopped; ``--table`` prints the tables of such a file. ``--spare`` plays adaptive with one
spare instead, and prints its values alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness import Tree, job, markdown, matrix, options, with_interval
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.events.log import read_log
from trainchaos.chaos.loading.load import load
from trainchaos.harness.fuzz.play.child import tied
from trainchaos.harness.fuzz.play.simulated_arm import simulated_arm
from trainchaos.harness.judge.measure.measure import measure

ADAPTIVE = "adaptive"
FIXED = ("hot-spare", "drop-replica", "checkpoint-restart")
STRATEGIES = (*FIXED, ADAPTIVE)
WITH_A_SPARE = "adaptive with a spare"
"""Played where it is asked for (``--spare``), beside the others and not among them."""
MOST_BEHIND = 0.05
STEPS, FIRST, LAST = 120, 32, 100
"""Faults come after a first checkpoint of every kind of costs, and early enough to be paid for."""
Faults = Callable[[random.Random, int], list[Tree]]
Values = Mapping[tuple[str, str], Mapping[str, Sequence[float]]]
"""(mix, costs) -> strategy -> goodput, in the order of the seeds."""


@dataclass(frozen=True)
class CostSetting:
    """What things cost in a simulation, milliseconds; ``every``: steps between two checkpoints."""

    step: int
    spawn: int
    transfer: int
    checkpoint: int
    every: int


COSTS: Mapping[str, CostSetting] = {
    "all cheap, checkpoint old": CostSetting(40, 120, 6, 25, every=30),
    "start dear, checkpoint fresh": CostSetting(40, 2500, 6, 25, every=5),
    "copy dear, checkpoint old": CostSetting(40, 300, 600, 300, every=30),
    "steps long, checkpoint fresh": CostSetting(1000, 300, 50, 200, every=5),
}


@dataclass(frozen=True, kw_only=True)
class Mix:
    """``faults``: drawn for a seed and a number of ranks; ``nodes``: of the job; ``workload``: more
    about it; ``halves``: two replicas of shards.
    """

    faults: Faults
    nodes: int = 1
    workload: Mapping[str, str] | None = None
    halves: bool = False


def _steps(draw: random.Random, count: int) -> list[int]:
    """So many steps, evenly spread but for a third of their distance."""
    gap = (LAST - FIRST) / count
    return [FIRST + round(gap * (n + draw.random() / 3)) for n in range(count)]


def _fault(number: int, kind: str, target: Any, step: int, **more: Any) -> Tree:
    target = {"rank": target} if isinstance(target, int) else target
    return {"id": f"f{number}", "kind": kind, "target": target, "at": {"step": step}, **more}


def _each(kind: str, count: int, *, same: bool = False, **more: Any) -> Faults:
    """So many faults of a kind, each of a rank of its own, or all of the same."""

    def faults(draw: random.Random, ranks: int) -> list[Tree]:
        only = draw.randrange(ranks)
        return [
            _fault(n, kind, only if same else draw.randrange(ranks), step, **more)
            for n, step in enumerate(_steps(draw, count))
        ]

    return faults


def _slow(draw: random.Random, ranks: int) -> list[Tree]:
    slow, killed = _steps(draw, 2)
    more: Tree = {"params": {"factor": 3}, "duration": {"steps": 15}}
    return [
        _fault(0, "straggler", draw.randrange(ranks), slow, **more),
        _fault(1, "process-kill", draw.randrange(ranks), killed),
    ]


def _warned(draw: random.Random, ranks: int) -> list[Tree]:
    faults = []
    for n, step in enumerate(_steps(draw, 3)):
        rank = draw.randrange(ranks)
        failing = {"what": "xid", "code": 48}
        faults.append(_fault(2 * n, "health-event", rank, step, params=failing))
        if n % 2 == 0:  # of a device that does fail
            faults.append(_fault(2 * n + 1, "process-kill", rank, step + 8))
    return faults


def _nodes(draw: random.Random, ranks: int) -> list[Tree]:
    return [_fault(n, "node-kill", {"node": 1}, step) for n, step in enumerate(_steps(draw, 2))]


def _whole(draw: random.Random, ranks: int) -> list[Tree]:
    kill, stop = _steps(draw, 2)
    return [
        _fault(0, "process-kill", {"role": "worker", "select": "all"}, kill),
        _fault(1, "process-stop", draw.randrange(ranks), stop),
    ]


_NAN = {"params": {"surface": "gradient", "op": "nan"}}


def _mixed(draw: random.Random, ranks: int) -> list[Tree]:
    kinds: list[tuple[str, Tree]] = [("process-kill", {}), ("process-stop", {})]
    kinds += [("tensor-corrupt", _NAN), ("exception", {})]
    draw.shuffle(kinds)
    return [
        _fault(n, kind, draw.randrange(ranks), step, **more)
        for n, ((kind, more), step) in enumerate(zip(kinds, _steps(draw, 4), strict=True))
    ]


MIXES: Mapping[str, Mix] = {
    "kills, rare": Mix(faults=_each("process-kill", 1)),
    "kills, frequent": Mix(faults=_each("process-kill", 6)),
    "hangs": Mix(faults=_each("process-stop", 3)),
    "NaN of data": Mix(faults=_each("poison-sample", 1)),
    "NaN of a device": Mix(faults=_each("tensor-corrupt", 4, same=True, **_NAN)),
    "slow rank, then a kill": Mix(faults=_slow),
    "flapping place": Mix(faults=_each("process-kill", 5, same=True)),
    "node losses": Mix(faults=_nodes, nodes=4),
    "warnings": Mix(faults=_warned),
    "whole job": Mix(faults=_whole),
    "mixed": Mix(faults=_mixed),
    "kills, two replicas of shards": Mix(faults=_each("process-kill", 3), halves=True),
    "kills, elastic sums": Mix(
        faults=_each("process-kill", 3), workload={"determinism": "elastic"}
    ),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One job of the sweep."""

    mix: str
    costs: str
    seed: int
    ranks: int


def scenario(arm: Arm, strategies: Sequence[str] = STRATEGIES) -> Tree:
    """The same faults under every strategy."""
    mix, costs = MIXES[arm.mix], COSTS[arm.costs]
    shape: Tree = {"determinism": "default", **(mix.workload or {})}
    if mix.halves:
        shape = {"parallelism": {"hsdp": {"replicas": 2, "shards": arm.ranks // 2}}}
    params = {f"{name}_ms": getattr(costs, name) for name in ("step", "spawn", "transfer")}
    params |= {"checkpoint_ms": costs.checkpoint, "follows_share": 1}
    made = job(
        "bench-adaptive",
        arm.seed,
        steps=STEPS,
        recovery="",
        launcher={"kind": "sim", "nodes": mix.nodes, "params": params},
        faults=mix.faults(random.Random(f"{arm.mix}/{arm.seed}"), arm.ranks),
        stop_conditions=[{"when": "no_committed_step_for > 120s"}],
    )
    saves = {"every": costs.every, "keep": 3}
    made["workload"] = {
        **{"kind": "mlp", "ranks": arm.ranks, "steps": STEPS, "global_batch": 4 * arm.ranks},
        **{"checkpoint": saves, **shape},
    }
    spared: Any = {"strategy": ADAPTIVE, "params": {"spares": 1}}
    return matrix(made, [spared if name == WITH_A_SPARE else name for name in strategies])


def play(arm: Arm, runs: Path, strategies: Sequence[str] = STRATEGIES) -> dict[str, float]:
    """Strategy -> goodput, by the judge's own measures of the log of its faulted arm."""
    found = {}
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        path = Path(folder) / "scenario.yaml"
        path.write_text(json.dumps(scenario(arm, strategies)))
        for number, cell in enumerate(load(path, build_catalogue()).cells):
            played, events = simulated_arm(
                cell, Path(folder) / str(number), seed=arm.seed, samples=4096
            )
            played.run()
            spec = cell.scenario.recovery
            values = measure(read_log(events), None).values["goodput"]
            name = WITH_A_SPARE if spec.params.get("spares") else spec.strategy
            found[name] = values[0] if values else 0.0
    return found


def _in_a_hurry(parent: int) -> None:
    """A process that ends with this one. What a run leaves on disk is deleted at once, and need not
    survive a power cut: waiting for the disk would take most of the time.
    """
    tied(parent)
    os.fsync = lambda fd: None


def _played(task: tuple[Arm, Path, Sequence[str]]) -> tuple[Arm, dict[str, float]]:
    arm, runs, strategies = task
    return arm, play(arm, runs, strategies)


def _saved(path: Path | None) -> list[Tree]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def sweep(given: argparse.Namespace) -> list[Tree]:
    """Play what the file does not hold yet."""
    lines = _saved(given.save)
    there = {(line["mix"], line["costs"], line["seed"]) for line in lines}
    strategies = (WITH_A_SPARE,) if given.spare else STRATEGIES
    arms = [
        (Arm(mix=mix, costs=costs, seed=seed, ranks=given.ranks), given.runs, strategies)
        for seed in range(1, given.seeds + 1)
        for mix in given.mixes.split(";")
        for costs in given.costs.split(";")
        if (mix, costs, seed) not in there
    ]
    with ProcessPoolExecutor(given.jobs, None, _in_a_hurry, (os.getpid(),)) as pool:
        for arm, goodput in pool.map(_played, arms):
            line = {"mix": arm.mix, "costs": arm.costs, "seed": arm.seed, "goodput": goodput}
            lines.append(line)
            if given.save is not None:
                with given.save.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return lines


def gathered(lines: Iterable[Tree]) -> Values:
    """The values of a saved sweep, by mix and costs."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for line in sorted(lines, key=lambda line: int(line["seed"])):
        cell = found.setdefault((line["mix"], line["costs"]), {})
        for strategy, value in line["goodput"].items():
            cell.setdefault(strategy, []).append(float(value))
    return found


def behind(values: Mapping[str, Sequence[float]]) -> tuple[str, list[float]]:
    """The fixed strategy of the best median, and by how much of it adaptive is better with each
    seed (negative: worse).
    """
    best = max(FIXED, key=lambda name: median(values[name]))
    pairs = zip(values[ADAPTIVE], values[best], strict=True)
    return best, [(own - other) / other if other else 0.0 for own, other in pairs]


def table(values: Values) -> str:
    """Goodput by mix and costs: median of each, and adaptive against the best fixed strategy."""
    head = ["mix", "costs", "n", *STRATEGIES, "best fixed", "adaptive against it, median (95 % CI)"]
    rows = []
    for (mix, costs), cell in values.items():
        best, ratios = behind(cell)
        medians = [with_interval(cell[name]).replace(" to ", "-") for name in STRATEGIES]
        rows.append([mix, costs, len(ratios), *medians, best, with_interval(ratios, "+.1%")])
    return markdown(head, rows)


def overall(values: Values) -> str:
    """Over all mixes and costs: mean goodput, how often each is the best, and paired differences
    of adaptive to each.
    """
    rows = []
    for name in STRATEGIES:
        every = [value for cell in values.values() for value in cell[name]]
        own = [value for cell in values.values() for value in cell[ADAPTIVE]]
        pairs = [mine - other for mine, other in zip(own, every, strict=True)]
        worst = min(median(cell[name]) for cell in values.values())
        differs = "" if name == ADAPTIVE else with_interval(pairs, "+.3f")
        rows.append([name, len(every), f"{fmean(every):.3f}", f"{worst:.3f}", differs])
    head = ["strategy", "n", "mean goodput", "worst cell", "adaptive - it, median (95 % CI)"]
    return markdown(head, rows)


def too_far_behind(values: Values) -> Iterator[str]:
    """Cells where adaptive's median is more than ``MOST_BEHIND`` below the best fixed strategy's,
    and fixed strategies that are better overall.
    """
    for (mix, costs), cell in values.items():
        best, ratios = behind(cell)
        if median(ratios) < -MOST_BEHIND:
            yield f"{mix}, {costs}: {-median(ratios):.1%} behind {best}"
    means = {name: sum(fmean(cell[name]) for cell in values.values()) for name in STRATEGIES}
    for name in FIXED:
        if means[name] >= means[ADAPTIVE]:
            yield f"{name} is better overall"


def main() -> None:
    """Play the sweep, or read one, and print its tables; exit status 1 where adaptive is too far
    behind.
    """
    parser = options(__doc__, runs="runs/bench")
    add = parser.add_argument
    add("--seeds", type=int, default=10)
    add("--ranks", type=int, default=6)
    add("--mixes", default=";".join(MIXES), help="separated by ;")
    add("--costs", default=";".join(COSTS), help="separated by ;")
    add("--jobs", type=int, default=1, help="processes that simulate")
    add("--spare", action="store_true", help="adaptive with a spare, alone")
    add("--save", type=Path, help="keep the values here, and go on from them")
    add("--table", type=Path, help="print the tables of saved values")
    given = parser.parse_args()
    values = gathered(_saved(given.table) if given.table else sweep(given))
    if given.spare:
        for (mix, costs), cell in values.items():
            print(f"{mix}, {costs}: {with_interval(cell[WITH_A_SPARE])}")
        return
    print(f"{table(values)}\n\n{overall(values)}\n")
    far = list(too_far_behind(values))
    near = "adaptive is nowhere more than 5 % behind, and better than each overall"
    print("\n".join(far) or near)
    raise SystemExit(1 if far else 0)


if __name__ == "__main__":
    main()
