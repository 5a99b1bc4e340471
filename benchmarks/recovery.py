"""Recovery time of each strategy after SIGKILL and SIGSTOP: 20 incidents each, phase and rank chosen by the
seed.

    python -m benchmarks.recovery [--incidents 20] [--runs runs/bench]

One arm of training suffers ten incidents, far enough apart to be independent; arms of all strategies and
faults are interleaved. The numbers come from the event logs, by the same code that judges any run.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

from chaos.cli import build_catalogue
from chaos.loading.load import load
from harness.results import Results
from harness.runner import run_scenario

PER_ARM = 10
GAP = 20
STRATEGIES = ("drop-replica", "hot-spare", "checkpoint-restart")
FAULTS = {"SIGKILL": "process-kill", "SIGSTOP": "process-stop"}
# Seconds, median: what the project set out to reach on 2 cores at 4 ranks of gpt nano.
GOALS = {
    ("drop-replica", "SIGKILL"): 0.2, ("hot-spare", "SIGKILL"): 0.3, ("checkpoint-restart", "SIGKILL"): 1.5,
    ("drop-replica", "SIGSTOP"): 1.2, ("hot-spare", "SIGSTOP"): 1.3, ("checkpoint-restart", "SIGSTOP"): 2.5,
}  # fmt: skip


def scenario(kind: str, repeats: int) -> str:
    """The scenario as YAML text."""
    faults = "\n".join(
        f"  - {{id: f{i:02}, kind: {kind}, at: {{step: {GAP * (i + 1)}, phase: any}}}}"
        for i in range(PER_ARM)
    )
    return f"""version: 1
name: bench-{kind}
seed: 1
workload:
  {{kind: gpt, size: nano, ranks: 4, steps: {GAP * (PER_ARM + 1)}, global_batch: 16, checkpoint: {{every: 10}}}}
recovery: ${{matrix.recovery}}
faults:
{faults}
stop_conditions: [{{when: "no_committed_step_for > 60s"}}]
matrix: {{recovery: [{", ".join(STRATEGIES)}]}}
repeat: {repeats}
baseline: none
invariants: [fault-landed, sample-accounting, single-writer, no-lost-commit, liveness, no-orphans, evidence-complete]
"""


def run(kind: str, repeats: int, runs: Path) -> Results:
    """Run the scenario of one fault kind."""
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / f"{kind}.yaml"
    path.write_text(scenario(kind, repeats))
    loaded = load(path, build_catalogue(), overrides=[], env={})
    return run_scenario(loaded, runs=runs, seed=None, live=True, argv=["run", str(path)])


def rows(name: str, results: Results) -> list[list[str]]:
    """One row a strategy: incidents, medians of time and phases, maximum, goal."""
    found = []
    for cell in results.cells:
        metrics = cell.metrics
        recovery, detection = metrics["recovery_time"], metrics["detection_time"]
        goal = GOALS[cell.strategy, name]
        ci = f"{recovery.ci95[0]:.3f}-{recovery.ci95[1]:.3f}" if recovery.ci95 else "-"
        met = "met" if recovery.median is not None and recovery.median <= goal else "MISSED"
        found.append(
            [cell.strategy, name, str(recovery.n), _s(recovery.median), ci, _s(recovery.max), _s(detection.median),
             f"{goal:g}", met, str(cell.verdict)]
        )  # fmt: skip
    return found


def _s(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--incidents", type=int, default=20)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    repeats = max(1, options.incidents // PER_ARM)
    table = []
    for name, kind in FAULTS.items():
        table += rows(name, run(kind, repeats, options.runs))
    head = ["strategy", "fault", "n", "median s", "95 % CI", "max s", "detection s", "goal s", "", "verdict"]
    print(f"Recovery time, gpt nano, 4 ranks, CPU gloo, {platform.machine()}, {_cores()} cores\n")
    for line in (head, ["---"] * len(head), *table):
        print("| " + " | ".join(line) + " |")


def _cores() -> int:
    from harness.devices import describe

    return int(describe()["cores"])


if __name__ == "__main__":
    main()
