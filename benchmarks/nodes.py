"""Cost of failures on nodes (a killed rank, a stopped rank, a lost node) under several launchers,
interleaved.

    python -m benchmarks.nodes [--launchers local,docker] [--incidents 20] [--node-kills 10]
                               [--runs runs/bench-nodes]

Ranks on four nodes, killed and stopped one at a time under drop-replica and hot-spare; then two
ranks on each of two nodes, one of which is lost as a whole while a third node stands by. ``slurm``
works inside an allocation of four nodes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    EVERY,
    Measured,
    Tree,
    in_s,
    job,
    markdown,
    matrix,
    options,
    play,
)
from benchmarks.recovery import INVARIANTS, PER_ARM, ours
from trainchaos.chaos.stats import median_ci95

LOSS_STEPS, LOSS_AT = 90, 40


def on_ranks(kind: str, launcher: str, number: int) -> Tree:
    """Faults of single ranks, each on a separate node."""
    scenario = ours(kind, "", random.Random(number), number)
    scenario |= {"name": f"bench-{launcher}-{kind}", "launcher": {"kind": launcher, "nodes": 4}}
    return matrix(scenario, ("drop-replica", "hot-spare"))


def of_a_node(launcher: str, number: int) -> Tree:
    """Loss of a node while another stands by."""
    at = {"step": LOSS_AT + random.Random(number).randrange(EVERY), "phase": "any"}
    return job(
        f"bench-{launcher}-node-kill",
        number,
        steps=LOSS_STEPS,
        recovery={"strategy": "hot-spare", "spares": 2},
        launcher={"kind": launcher, "nodes": 3},
        faults=[{"id": "lost", "kind": "node-kill", "target": {"node": 1}, "at": at}],
        invariants=INVARIANTS,
    )


def measure(launchers: Sequence[str], incidents: int, losses: int, runs: Path) -> Measured:
    """Play everything, launchers in turn."""
    measured = Measured()
    for number in range(max(-(-incidents // PER_ARM), losses)):
        for launcher in launchers:
            arms = [("node lost", of_a_node(launcher, number))] if number < losses else []
            if number * PER_ARM < incidents:
                arms += [
                    (word, on_ranks(kind, launcher, number))
                    for kind, word in (("process-kill", "SIGKILL"), ("process-stop", "SIGSTOP"))
                ]
            for word, scenario in arms:
                label = f"{word}, {launcher}"
                results = play(f"{scenario['name']}-{number}", scenario, runs)
                measured.add(results, lambda strategy, label=label: f"{strategy} {label}")  # type: ignore[misc]
    return measured


def table(measured: Measured) -> str:
    """Recovery times, and their part after detection."""
    head = ["recovery of", "n", "median s", "95 % CI", "max s", "detection, median s"]
    rows = []
    for row, values in measured.recovery.items():
        seen, interval = measured.detection[row], median_ci95(values)
        after = [whole - seen_s for whole, seen_s in zip(values, seen, strict=True)]
        said = f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-"
        cells = [row, str(len(values)), in_s(median(values)), said, in_s(max(values))]
        rows.append([*cells, in_s(median(seen)), f"{median(after):.3f} ({max(after):.3f})"])
    return markdown([*head, "after detection, median (max) s"], rows)


def main() -> None:
    """Measure and print Markdown tables."""
    parser = options(__doc__, runs="runs/bench-nodes")
    parser.add_argument("--launchers", default="local,docker", help="compared with each other")
    parser.add_argument(
        "--incidents", type=int, default=20, help=f"of single ranks, of each kind, by {PER_ARM}"
    )
    parser.add_argument("--node-kills", type=int, default=10, help="of each launcher")
    given = parser.parse_args()
    launchers = given.launchers.split(",")
    measured = measure(launchers, given.incidents, given.node_kills, given.runs)
    steps = [step for row, found in measured.steps.items() if "SIG" in row for step in found]
    print(f"median step {median(steps) * 1e3:.1f} ms (n={len(steps)} arms)\n")
    print(f"{table(measured)}\n\n{measured.phase_table()}\n\n{measured.verdict_line()}")


if __name__ == "__main__":
    main()
