"""Cost of failures on nodes (a killed rank, a stopped rank, a lost node) under several launchers,
interleaved.

    python -m benchmarks.nodes [--launchers local,docker] [--incidents 20] [--node-kills 10]
                               [--runs runs/bench-nodes]

Ranks on four nodes, killed and stopped one at a time under drop-replica and hot-spare; then two
ranks on each of two nodes, one of which is lost as a whole while a third node stands by. ``slurm``
works inside an allocation of four nodes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import table
from benchmarks.recovery import (
    BATCH,
    EVERY,
    INVARIANTS,
    PER_ARM,
    RANKS,
    STEPS,
    Measured,
    faults,
    play,
)
from trainchaos.chaos.stats import median_ci95

STOP = 'stop_conditions: [{when: "no_committed_step_for > 60s"}]'
SAVES = f"{{every: {EVERY}}}"
LOSS_STEPS, LOSS_AT = 90, 40


def on_ranks(kind: str, launcher: str, draw: random.Random, seed: int) -> str:
    """Faults of single ranks, each on a separate node, as YAML text."""
    return f"""version: 1
name: bench-{launcher}-{kind}
seed: {seed}
workload: {{kind: gpt, size: nano, ranks: {RANKS}, steps: {STEPS}, global_batch: {BATCH},
  checkpoint: {SAVES}}}
launcher: {{kind: {launcher}, nodes: 4}}
recovery: ${{matrix.recovery}}
faults:
{faults(kind, draw, within=", phase: any")}
{STOP}
matrix: {{recovery: [drop-replica, hot-spare]}}
baseline: none
invariants: {INVARIANTS}
"""


def of_a_node(launcher: str, draw: random.Random, seed: int) -> str:
    """Loss of a node while another stands by, as YAML text."""
    at = f"{{step: {LOSS_AT + draw.randrange(EVERY)}, phase: any}}"
    return f"""version: 1
name: bench-{launcher}-node-kill
seed: {seed}
workload: {{kind: gpt, size: nano, ranks: 4, steps: {LOSS_STEPS}, global_batch: {BATCH},
  checkpoint: {SAVES}}}
launcher: {{kind: {launcher}, nodes: 3}}
recovery: {{strategy: hot-spare, spares: 2}}
faults:
  - {{id: lost, kind: node-kill, target: {{node: 1}}, at: {at}}}
{STOP}
baseline: none
invariants: {INVARIANTS}
"""


def rows_of(measured: Measured) -> str:
    """Recovery times, and their part after detection, as Markdown."""
    lines = [
        "| recovery of | n | median s | 95 % CI | max s | detection, median s | after detection,"
        " median (max) s |"
    ]
    lines.append("| --- " * 7 + "|")
    for row, values in measured.recovery.items():
        found, interval = measured.detection[row], median_ci95(values)
        after = [whole - seen for whole, seen in zip(values, found, strict=True)]
        said = f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-"
        lines.append(
            f"| {row} | {len(values)} | {median(values):.3f} | {said} | {max(values):.3f} |"
            f" {median(found):.3f} | {median(after):.3f} ({max(after):.3f}) |"
        )
    return "\n".join(lines)


def measure(launchers: Sequence[str], incidents: int, losses: int, runs: Path) -> Measured:
    """Play everything, launchers in turn."""
    measured = Measured()
    for number in range(max(-(-incidents // PER_ARM), losses)):
        for launcher in launchers:
            if number * PER_ARM < incidents:
                for kind, word in (("process-kill", "SIGKILL"), ("process-stop", "SIGSTOP")):
                    text = on_ranks(kind, launcher, random.Random(number), number)
                    results = play(f"{launcher}-{kind}-{number}", text, runs)
                    measured.add(f"{word}, {launcher}", results)
                    measured.steps += [
                        v for cell in results.cells for v in cell.metrics["step_time"].values
                    ]
            if number < losses:
                text = of_a_node(launcher, random.Random(number), number)
                measured.add(
                    f"node lost, {launcher}", play(f"{launcher}-loss-{number}", text, runs)
                )
    return measured


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--launchers", default="local,docker", help="compared with each other")
    parser.add_argument(
        "--incidents", type=int, default=20, help=f"of single ranks, of each kind, by {PER_ARM}"
    )
    parser.add_argument("--node-kills", type=int, default=10, help="of each launcher")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-nodes"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    measured = measure(
        options.launchers.split(","), options.incidents, options.node_kills, options.runs
    )
    print(f"median step {median(measured.steps) * 1e3:.1f} ms (n={len(measured.steps)} arms)\n")
    print(rows_of(measured))
    print(f"\n{table.phases(measured.phases)}")
    bad = [verdict for verdict in measured.verdicts if not verdict.endswith("pass")]
    print(f"{len(measured.verdicts)} arms; verdicts other than pass: {', '.join(bad) or 'none'}")


if __name__ == "__main__":
    main()
