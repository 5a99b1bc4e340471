"""Cost of a failure: SIGKILL and SIGSTOP under each strategy, and under torchrun, in interleaved
rounds.

    python -m benchmarks.recovery [--incidents 20] [--no-torchrun] [--runs runs/bench]

Every round plays one arm of each kind, with five incidents far enough apart to be independent;
rank, phase and distance to the last checkpoint are drawn from the round's number. torchrun restarts
the same model, data, global batch and checkpoints under the same injector and judge. The numbers
come from the event logs, computed by the code that judges every run.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import table
from benchmarks.scenarios import play
from trainchaos.harness.judge.results import Results

RANKS, BATCH, EVERY, GAP, PER_ARM = 4, 16, 10, 20, 5
STEPS = GAP * (PER_ARM + 1) + EVERY
OFTEN = 2  # steps between checkpoints in memory
COLD = "{strategy: checkpoint-restart, params: {restart: cold}}"
WARM = "drop-replica, hot-spare, checkpoint-restart"
INVARIANTS = (
    "[fault-landed, sample-accounting, single-writer, no-lost-commit, liveness, no-orphans,"
    " evidence-complete]"
)
SEEN_FROM_OUTSIDE = "[fault-landed, detection, liveness, no-orphans, evidence-complete]"
IMPORT_LIMIT_S = 300.0


def _lists() -> dict[str, list[float]]:
    return defaultdict(list)


@dataclass(kw_only=True)
class Measured:
    """Seconds, by row of the table. ``steps``: median step of each arm; ``verdicts``: of
    all arms.
    """

    recovery: dict[str, list[float]] = field(default_factory=_lists)
    detection: dict[str, list[float]] = field(default_factory=_lists)
    phases: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(_lists))
    steps: list[float] = field(default_factory=list)
    imports: list[float] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    def add(self, label: str, results: Results) -> None:
        """Add a run's measurements; a row is a strategy and ``label``."""
        for cell in results.cells:
            row = f"{cell.strategy} {label}".strip()
            self.recovery[row] += cell.metrics["recovery_time"].values
            self.detection[row] += cell.metrics["detection_time"].values
            self.verdicts.append(f"{row}: {cell.verdict}")
            for incident in results.faults:
                for span in incident.phases if incident.cell == cell.id else ():
                    self.phases[row][span.name].append(span.seconds)


def faults(kind: str, draw: random.Random, *, within: str) -> str:
    """The faults of an arm, each at another distance from a checkpoint."""
    lines = []
    for number in range(PER_ARM):
        at = f"{{step: {GAP * (number + 1) + draw.randrange(EVERY)}{within}}}"
        lines.append(f"  - {{id: f{number}, kind: {kind}, target: {{select: one}}, at: {at}}}")
    return "\n".join(lines)


def ours(kind: str, recovery: str, draw: random.Random, seed: int, *, saves: str = "") -> str:
    """The scenario of the built-in workload as YAML text. ``saves``: more about its checkpoints."""
    return f"""version: 1
name: bench-{kind}
seed: {seed}
workload:
  kind: gpt
  size: nano
  ranks: {RANKS}
  steps: {STEPS}
  global_batch: {BATCH}
  checkpoint: {{every: {EVERY}{saves}}}
recovery: ${{matrix.recovery}}
faults:
{faults(kind, draw, within=", phase: any")}
stop_conditions: [{{when: "no_committed_step_for > 60s"}}]
matrix: {{recovery: [{recovery}]}}
baseline: none
invariants: {INVARIANTS}
"""


def torchrun(draw: random.Random, seed: int, corpus: Path) -> str:
    """The scenario of torchrun as YAML text."""
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc-per-node",
        str(RANKS),
        "--max-restarts",
        "99",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "-m",
        "benchmarks.loops.torchrun_gpt",
    ]
    return f"""version: 1
name: bench-torchrun
seed: {seed}
workload:
  command: {command!r}
  directory: {Path.cwd()}
  ranks: {RANKS}
  steps: {STEPS}
  global_batch: {BATCH}
  env:
    CHECKPOINT_DIR: $CHAOS_SCRATCH
    DATA: {corpus}
    STEPS: "{STEPS}"
    EVERY: "{EVERY}"
    OMP_NUM_THREADS: "1"
    GLOO_SOCKET_IFNAME: lo
    # without it a restarted job may read its predecessor's addresses (pytorch #135712)
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE: "1"
  progress: {{regex: 'step (?P<step>\\d+)/\\d+ loss (?P<loss>\\S+)'}}
  progress_deadline: 120s
faults:
{faults("process-kill", draw, within="")}
baseline: none
invariants: {SEEN_FROM_OUTSIDE}
"""


def import_time_s() -> float:
    """Seconds until one new Python process per rank has imported torch, as cold ranks do."""
    started = time.perf_counter()
    pythons = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(RANKS)]
    try:
        for python in pythons:
            python.wait(timeout=IMPORT_LIMIT_S)
    finally:
        for python in pythons:
            python.kill()
    return time.perf_counter() - started


def play_round(number: int, runs: Path, measured: Measured, *, peer: bool) -> None:
    """One arm of each kind."""
    draw = random.Random(number)
    killed = play(f"kill-{number}", ours("process-kill", WARM, draw, number), runs)
    measured.add("SIGKILL", killed)
    stopped = play(f"stop-{number}", ours("process-stop", WARM, draw, number), runs)
    measured.add("SIGSTOP", stopped)
    for cell in (*killed.cells, *stopped.cells):
        measured.steps += cell.metrics["step_time"].values
    measured.imports.append(import_time_s())
    measured.add(
        "cold, SIGKILL", play(f"cold-{number}", ours("process-kill", COLD, draw, number), runs)
    )
    in_memory = ours(
        "process-kill", "checkpoint-restart", draw, number, saves=f", memory: {{every: {OFTEN}}}"
    )
    measured.add("in memory, SIGKILL", play(f"memory-{number}", in_memory, runs))
    if peer:
        corpus = runs / killed.scenario / killed.run_id / "data" / "0" / "corpus.bin"
        results = play(f"torchrun-{number}", torchrun(draw, number, corpus.resolve()), runs)
        measured.add("SIGKILL", results)


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--incidents", type=int, default=20, help=f"of each kind, in rounds of {PER_ARM}"
    )
    parser.add_argument("--no-torchrun", action="store_true", help="leave the peer out")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    measured = Measured()
    for number in range(-(-options.incidents // PER_ARM)):
        play_round(number, options.runs, measured, peer=not options.no_torchrun)
    print(
        table.recovery(
            measured.recovery, measured.detection, steps=measured.steps, imports=measured.imports
        )
    )
    print(table.phases(measured.phases))
    bad = [verdict for verdict in measured.verdicts if not verdict.endswith("pass")]
    print(f"{len(measured.verdicts)} arms; verdicts other than pass: {', '.join(bad) or 'none'}")


if __name__ == "__main__":
    main()
