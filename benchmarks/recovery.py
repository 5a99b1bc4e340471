"""Cost of a failure: SIGKILL and SIGSTOP under each strategy, and under torchrun, in interleaved
rounds.

    python -m benchmarks.recovery [--incidents 20] [--no-torchrun] [--runs runs/bench]

Every round plays one arm of each kind, with five incidents far enough apart to be independent;
rank, phase and distance to the last checkpoint are drawn from the round's number. torchrun restarts
the same model, data, global batch and checkpoints under the same injector and judge. The numbers
come from the event logs, computed by the code that judges every run.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    BATCH,
    EVERY,
    RANKS,
    Measured,
    Tree,
    in_s,
    job,
    machine,
    markdown,
    matrix,
    options,
    play,
    seconds,
)
from trainchaos.chaos.stats import median_ci95

GAP, PER_ARM = 20, 5
STEPS = GAP * (PER_ARM + 1) + EVERY
OFTEN = 2  # steps between checkpoints in memory
WARM = ("drop-replica", "hot-spare", "checkpoint-restart")
COLD = {"strategy": "checkpoint-restart", "params": {"restart": "cold"}}
INVARIANTS = ["fault-landed", "sample-accounting", "single-writer", "no-lost-commit", "liveness"]
INVARIANTS += ["no-orphans", "evidence-complete"]
FROM_OUTSIDE = ["fault-landed", "detection", "liveness", "no-orphans", "evidence-complete"]
IMPORT_LIMIT_S = 300.0
TORCHRUN = "own SIGKILL"
NAMES = {
    TORCHRUN: "torchrun --max-restarts, SIGKILL",
    "checkpoint-restart SIGKILL": "checkpoint-restart warm, SIGKILL",
    "checkpoint-restart in memory, SIGKILL": "checkpoint-restart warm, from memory, SIGKILL",
}
AHEAD_OF_TORCHRUN = {
    "drop-replica SIGKILL": 40,
    "hot-spare SIGKILL": 40,
    "checkpoint-restart SIGKILL": 5,
    "checkpoint-restart in memory, SIGKILL": 5,
}


def faults(kind: str, draw: random.Random, **more: str) -> list[Tree]:
    """The faults of an arm, each at another distance from a checkpoint."""
    steps = [GAP * (number + 1) + draw.randrange(EVERY) for number in range(PER_ARM)]
    return [
        {"id": f"f{n}", "kind": kind, "target": {"select": "one"}, "at": {"step": step, **more}}
        for n, step in enumerate(steps)
    ]


def ours(kind: str, recovery: object, draw: random.Random, seed: int, **checkpoint: object) -> Tree:
    """The scenario of the built-in workload. ``checkpoint``: more about its checkpoints."""
    return job(
        f"bench-{kind}",
        seed,
        steps=STEPS,
        recovery=recovery,
        workload={"checkpoint": {"every": EVERY, **checkpoint}},
        faults=faults(kind, draw, phase="any"),
        invariants=INVARIANTS,
    )


def torchrun(draw: random.Random, seed: int, corpus: Path) -> Tree:
    """The scenario of torchrun."""
    program = str(Path(sys.executable).with_name("torchrun"))
    command = [program, "--nproc-per-node", str(RANKS), "--max-restarts", "99"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    env = {
        "CHECKPOINT_DIR": "$CHAOS_SCRATCH",
        "DATA": str(corpus),
        "STEPS": str(STEPS),
        "EVERY": str(EVERY),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # without it a restarted job may read its predecessor's addresses (pytorch #135712)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    workload = {
        "command": [*command, "-m", "benchmarks.loops.torchrun_gpt"],
        "directory": str(Path.cwd()),
        "ranks": RANKS,
        "steps": STEPS,
        "global_batch": BATCH,
        "env": env,
        "progress": {"regex": r"step (?P<step>\d+)/\d+ loss (?P<loss>\S+)"},
        "progress_deadline": "120s",
    }
    about = {"version": 1, "name": "bench-torchrun", "seed": seed, "baseline": "none"}
    hits = faults("process-kill", draw)
    return {**about, "workload": workload, "faults": hits, "invariants": FROM_OUTSIDE}


def import_torch() -> None:
    """One new Python process per rank imports torch, as cold ranks do."""
    pythons = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(RANKS)]
    try:
        for python in pythons:
            python.wait(timeout=IMPORT_LIMIT_S)
    finally:
        for python in pythons:
            python.kill()


def play_round(number: int, runs: Path, measured: Measured, *, peer: bool) -> float:
    """One arm of each kind; returns what the imports of torch took."""
    draw = random.Random(number)

    def arm(word: str, scenario: Tree, label: str) -> Path:
        results = play(f"{word}-{number}", scenario, runs)
        measured.add(results, lambda strategy: f"{strategy} {label}")
        return runs / results.scenario / results.run_id

    run = arm("kill", matrix(ours("process-kill", "", draw, number), WARM), "SIGKILL")
    arm("stop", matrix(ours("process-stop", "", draw, number), WARM), "SIGSTOP")
    import_s = seconds(import_torch)
    arm("cold", ours("process-kill", COLD, draw, number), "cold, SIGKILL")
    memory = {"every": OFTEN}
    in_memory = ours("process-kill", "checkpoint-restart", draw, number, memory=memory)
    arm("memory", in_memory, "in memory, SIGKILL")
    if peer:
        corpus = (run / "data" / "0" / "corpus.bin").resolve()
        arm("torchrun", torchrun(draw, number, corpus), "SIGKILL")
    return import_s


def goals(step_s: float, import_s: float) -> dict[str, tuple[float, str]]:
    """The largest median of each row with 4 ranks of gpt nano on 2 cores, and what it is derived
    from: a median step, and one import of torch per rank at the same time, of the same run.
    """
    hang_s = max(8 * step_s, 0.25)
    found = {
        "checkpoint-restart SIGKILL": (0.5, "0.5 s"),
        "checkpoint-restart in memory, SIGKILL": (0.5, "0.5 s"),
        "checkpoint-restart cold, SIGKILL": (1.3 * import_s, "1.3 x import torch"),
        "checkpoint-restart SIGSTOP": (hang_s + 0.5, "8 steps (0.25 s) + 0.5 s"),
    }
    for strategy, ms in (("drop-replica", 30), ("hot-spare", 60)):
        after_s, words = step_s + ms / 1e3, f"step + {ms} ms"
        found[f"{strategy} SIGKILL"] = after_s, words
        found[f"{strategy} SIGSTOP"] = hang_s + after_s, f"8 steps (0.25 s) + {words}"
    return found


def table(measured: Measured, imports: Sequence[float]) -> str:
    """Time from the fault to the first new committed step, one row per kind, with the ratio to
    torchrun.
    """
    plain = [f"{name} {word}" for name in WARM for word in ("SIGKILL", "SIGSTOP")]
    steps = [step for row in plain for step in measured.steps[row]]
    wanted = goals(median(steps), median(imports))
    head = ["recovery of", "n", "median s", "95 % CI", "max s", "detection, median s", "goal s", ""]
    rows = []
    for row, values in measured.recovery.items():
        if not values:
            rows.append([NAMES.get(row, row), 0, *["-"] * 7])
            continue
        middle, interval = median(values), median_ci95(values)
        goal_s, words = wanted.get(row, (0.0, ""))
        ahead = ""
        if (least := AHEAD_OF_TORCHRUN.get(row)) and (peer := measured.recovery.get(TORCHRUN)):
            ratio = median(peer) / middle
            ahead = f"{ratio:.1f} x (goal {least} x, {'met' if ratio >= least else 'MISSED'})"
        cells: list[object] = [NAMES.get(row, row), len(values), in_s(middle)]
        cells += [f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-", in_s(max(values))]
        cells += [in_s(median(measured.detection[row])) if measured.detection[row] else "-"]
        cells += [f"{goal_s:.3f} ({words})" if words else "-"]
        rows.append([*cells, ("met" if middle <= goal_s else "MISSED") if words else "", ahead])
    facts = (
        f"gpt nano, {RANKS} ranks, CPU gloo, {machine()}; median step {median(steps) * 1e3:.1f} ms"
        f" (n={len(steps)} arms, {min(steps) * 1e3:.1f}-{max(steps) * 1e3:.1f}); {RANKS} imports of"
        f" torch at once {median(imports):.2f} s (n={len(imports)})"
    )
    return f"{facts}\n\n{markdown([*head, 'torchrun takes'], rows)}\n"


def main() -> None:
    """Measure and print Markdown tables."""
    parser = options(__doc__, runs="runs/bench")
    parser.add_argument(
        "--incidents", type=int, default=20, help=f"of each kind, in rounds of {PER_ARM}"
    )
    parser.add_argument("--no-torchrun", action="store_true", help="leave the peer out")
    given = parser.parse_args()
    measured = Measured()
    imports = [
        play_round(number, given.runs, measured, peer=not given.no_torchrun)
        for number in range(-(-given.incidents // PER_ARM))
    ]
    print(table(measured, imports))
    print(f"{measured.phase_table(NAMES)}\n\n{measured.verdict_line()}")


if __name__ == "__main__":
    main()
