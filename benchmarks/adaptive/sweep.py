"""Whether ``adaptive`` loses least: fault mixes x costs x strategies in simulation, goodput as the
judge computes it, paired by seed.

    python -m benchmarks.adaptive [--seeds 10] [--ranks 6] [--mixes a,b] [--costs a,b]
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.adaptive.table import (
    STRATEGIES,
    gathered,
    overall,
    table,
    too_far_behind,
    with_interval,
)
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.events.log import read_log
from trainchaos.chaos.loading.load import load
from trainchaos.harness.fuzz.play.child import tied
from trainchaos.harness.fuzz.play.simulated_arm import simulated_arm
from trainchaos.harness.judge.measure.measure import measure

WITH_A_SPARE = "adaptive with a spare"
"""Played where it is asked for (``--spare``), beside the others and not among them."""
_AS_YAML = {WITH_A_SPARE: "{strategy: adaptive, params: {spares: 1}}"}
STEPS, FIRST, LAST = 120, 32, 100
"""Faults come after a first checkpoint of every kind of costs, and early enough to be paid for."""
Faults = Callable[[random.Random, int], list[str]]


@dataclass(frozen=True, kw_only=True)
class CostSetting:
    """What things cost in a simulation, milliseconds; ``every``: steps between two checkpoints."""

    step: int
    spawn: int
    transfer: int
    checkpoint: int
    every: int

    def launcher(self, nodes: int) -> str:
        """The simulator with these costs."""
        return (
            f"{{kind: sim, nodes: {nodes}, params: {{step_ms: {self.step}, spawn_ms: {self.spawn},"
            f" transfer_ms: {self.transfer}, checkpoint_ms: {self.checkpoint}, follows_share: 1}}}}"
        )


COSTS: Mapping[str, CostSetting] = {
    "all cheap, checkpoint old": CostSetting(
        step=40, spawn=120, transfer=6, checkpoint=25, every=30
    ),
    "start dear, checkpoint fresh": CostSetting(
        step=40, spawn=2500, transfer=6, checkpoint=25, every=5
    ),
    "copy dear, checkpoint old": CostSetting(
        step=40, spawn=300, transfer=600, checkpoint=300, every=30
    ),
    "steps long, checkpoint fresh": CostSetting(
        step=1000, spawn=300, transfer=50, checkpoint=200, every=5
    ),
}


@dataclass(frozen=True, kw_only=True)
class Mix:
    """``faults``: drawn for a seed and a number of ranks, as lines of YAML; ``nodes``: of the job;
    ``workload``: more about it.
    """

    faults: Faults
    nodes: int = 1
    workload: str = ""


def _steps(draw: random.Random, count: int) -> list[int]:
    """So many steps, evenly spread but for a third of their distance."""
    gap = (LAST - FIRST) / count
    return [FIRST + round(gap * (n + draw.random() / 3)) for n in range(count)]


def _fault(number: int, kind: str, target: str, step: int, more: str = "") -> str:
    return f"  - {{id: f{number}, kind: {kind}, target: {target}, at: {{step: {step}}}{more}}}"


def _each(kind: str, count: int, more: str = "", *, same: bool = False) -> Faults:
    """So many faults of a kind, each of a rank of its own, or all of the same."""

    def faults(draw: random.Random, ranks: int) -> list[str]:
        one = draw.randrange(ranks)
        return [
            _fault(n, kind, f"{{rank: {one if same else draw.randrange(ranks)}}}", step, more)
            for n, step in enumerate(_steps(draw, count))
        ]

    return faults


def _slow(draw: random.Random, ranks: int) -> list[str]:
    slow, killed = _steps(draw, 2)
    more = ", params: {factor: 3}, duration: {steps: 15}"
    return [
        _fault(0, "straggler", f"{{rank: {draw.randrange(ranks)}}}", slow, more),
        _fault(1, "process-kill", f"{{rank: {draw.randrange(ranks)}}}", killed),
    ]


def _warned(draw: random.Random, ranks: int) -> list[str]:
    lines = []
    for n, step in enumerate(_steps(draw, 3)):
        rank = draw.randrange(ranks)
        more = ", params: {what: xid, code: 48}"
        lines.append(_fault(2 * n, "health-event", f"{{rank: {rank}}}", step, more))
        if n % 2 == 0:  # of a device that does fail
            lines.append(_fault(2 * n + 1, "process-kill", f"{{rank: {rank}}}", step + 8))
    return lines


def _nodes(draw: random.Random, ranks: int) -> list[str]:
    return [_fault(n, "node-kill", "{node: 1}", step) for n, step in enumerate(_steps(draw, 2))]


def _whole(draw: random.Random, ranks: int) -> list[str]:
    kill, stop = _steps(draw, 2)
    return [
        _fault(0, "process-kill", "{role: worker, select: all}", kill),
        _fault(1, "process-stop", f"{{rank: {draw.randrange(ranks)}}}", stop),
    ]


def _mixed(draw: random.Random, ranks: int) -> list[str]:
    kinds = [
        ("process-kill", ""),
        ("process-stop", ""),
        ("tensor-corrupt", ", params: {surface: gradient, op: nan}"),
        ("exception", ""),
    ]
    draw.shuffle(kinds)
    return [
        _fault(n, kind, f"{{rank: {draw.randrange(ranks)}}}", step, more)
        for n, ((kind, more), step) in enumerate(zip(kinds, _steps(draw, 4), strict=True))
    ]


_NAN = ", params: {surface: gradient, op: nan}"
MIXES: Mapping[str, Mix] = {
    "kills, rare": Mix(faults=_each("process-kill", 1)),
    "kills, frequent": Mix(faults=_each("process-kill", 6)),
    "hangs": Mix(faults=_each("process-stop", 3)),
    "NaN of data": Mix(faults=_each("poison-sample", 1)),
    "NaN of a device": Mix(faults=_each("tensor-corrupt", 4, _NAN, same=True)),
    "slow rank, then a kill": Mix(faults=_slow),
    "flapping place": Mix(faults=_each("process-kill", 5, same=True)),
    "node losses": Mix(faults=_nodes, nodes=4),
    "warnings": Mix(faults=_warned),
    "whole job": Mix(faults=_whole),
    "mixed": Mix(faults=_mixed),
    "kills, two replicas of shards": Mix(
        faults=_each("process-kill", 3),
        workload=", parallelism: {hsdp: {replicas: 2, shards: HALF}}",
    ),
    "kills, elastic sums": Mix(faults=_each("process-kill", 3), workload=", determinism: elastic"),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One job of the sweep."""

    mix: str
    costs: str
    seed: int
    ranks: int


def scenario(arm: Arm, strategies: Sequence[str] = STRATEGIES) -> str:
    """Its YAML: the same faults under every strategy."""
    mix, costs = MIXES[arm.mix], COSTS[arm.costs]
    draw = random.Random(f"{arm.mix}/{arm.seed}")
    lines = "\n".join(mix.faults(draw, arm.ranks))
    more = mix.workload.replace("HALF", str(arm.ranks // 2))
    if "determinism" not in more:
        more += ", determinism: default"
    more = more.replace(", determinism: default", "") if "hsdp" in more else more
    return f"""version: 1
name: bench-adaptive
seed: {arm.seed}
workload: {{kind: mlp, ranks: {arm.ranks}, steps: {STEPS}, global_batch: {4 * arm.ranks},
  checkpoint: {{every: {costs.every}, keep: 3}}{more}}}
launcher: {costs.launcher(mix.nodes)}
recovery: ${{matrix.recovery}}
faults:
{lines}
baseline: none
stop_conditions: [{{when: "no_committed_step_for > 120s"}}]
matrix: {{recovery: [{", ".join(_AS_YAML.get(name, name) for name in strategies)}]}}
"""


def play(arm: Arm, runs: Path, strategies: Sequence[str] = STRATEGIES) -> dict[str, float]:
    """Strategy -> goodput, by the judge's own measures of the log of its faulted arm."""
    found = {}
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        path = Path(folder) / "scenario.yaml"
        path.write_text(scenario(arm, strategies))
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


def _saved(path: Path | None) -> list[dict[str, object]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def sweep(options: argparse.Namespace) -> list[dict[str, object]]:
    """Play what the file does not hold yet."""
    lines = _saved(options.save)
    there = {(line["mix"], line["costs"], line["seed"]) for line in lines}
    strategies = (WITH_A_SPARE,) if options.spare else STRATEGIES
    arms = [
        (Arm(mix=mix, costs=costs, seed=seed, ranks=options.ranks), options.runs, strategies)
        for seed in range(1, options.seeds + 1)
        for mix in options.mixes.split(";")
        for costs in options.costs.split(";")
        if (mix, costs, seed) not in there
    ]
    options.runs.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.jobs, None, _in_a_hurry, (os.getpid(),)) as pool:
        for arm, goodput in pool.map(_played, arms):
            line = {"mix": arm.mix, "costs": arm.costs, "seed": arm.seed, "goodput": goodput}
            lines.append(line)
            if options.save is not None:
                with options.save.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return lines


def main() -> None:
    """Play the sweep, or read one, and print its tables; exit status 1 where adaptive is too far
    behind.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--mixes", default=";".join(MIXES), help="separated by ;")
    parser.add_argument("--costs", default=";".join(COSTS), help="separated by ;")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate")
    parser.add_argument("--spare", action="store_true", help="adaptive with a spare, alone")
    parser.add_argument("--save", type=Path, help="keep the values here, and go on from them")
    parser.add_argument("--table", type=Path, help="print the tables of saved values")
    options = parser.parse_args()
    values = gathered(_saved(options.table) if options.table else sweep(options))
    if options.spare:
        for (mix, costs), cell in values.items():
            print(f"{mix}, {costs}: {with_interval(cell[WITH_A_SPARE])}")
        return
    print(f"{table(values)}\n\n{overall(values)}\n")
    far = list(too_far_behind(values))
    print(
        "\n".join(far) or "adaptive is nowhere more than 5 % behind, and better than each overall"
    )
    raise SystemExit(1 if far else 0)
