"""How recovery grows with the state: from the kill of a rank to the next step, by phase, for states
of 4 MB to 2 GB under each strategy; and what a live spare costs while nothing fails.

    python -m benchmarks.growth [--rounds 3] [--mb 4 40 400 2000] [--plot growth.png]
        [--strategies live rehearsed none drop warm] [--device cuda] [--gap 16] [--pause 0.1]
        [--runs runs/growth]

Two ranks and a spare train a model that costs nearly nothing to compute
(``benchmarks/loops/large_state.py``). Every round plays one arm of each size and strategy, one
after the other, with PER_ARM kills far enough apart that the next spare has come; the rank is drawn
from the round's number. The numbers come from the event logs, computed by the code that judges
every run. Recoveries that had to copy, under ``sync: live``, are counted and not left out. After
Ctrl-C the table has what was played.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.scenarios import play
from trainchaos.chaos.events.log import Kind, read_log
from trainchaos.harness.judge.results import Results

RANKS, PER_ARM = 2, 3
STRATEGIES = {
    "live": "{strategy: hot-spare, sync: live}",
    "rehearsed": "{strategy: hot-spare, sync: live, rehearse: true}",
    "none": "{strategy: hot-spare}",
    "drop": "{strategy: drop-replica}",
    "warm": "{strategy: checkpoint-restart}",
}
NAMES = {
    "live": "hot-spare, sync: live",
    "rehearsed": "hot-spare, sync: live, rehearse: true",
    "none": "hot-spare, sync: none",
    "drop": "drop-replica",
    "warm": "checkpoint-restart warm, from memory",
}
INVARIANTS = (
    "[fault-landed, sample-accounting, no-lost-commit, liveness, no-orphans, evidence-complete]"
)
LOOP = Path(__file__).parent / "loops" / "large_state.py"
DEFAULT = ["live", "none", "drop", "warm"]
Key = tuple[str, float]
"""A strategy, and a size in MB."""


@dataclass(kw_only=True)
class Growth:
    """Seconds, by strategy and size. ``copied``: bytes that each new member received; ``steps``:
    median step of each arm.
    """

    recovery: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[Key, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    copied: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    verdicts: list[str] = field(default_factory=list)

    def add(self, key: Key, results: Results, events: Path) -> None:
        """Add a run's measurements."""
        for cell in results.cells:
            self.recovery[key] += cell.metrics["recovery_time"].values
            self.steps[key] += cell.metrics["step_time"].values
            self.verdicts.append(str(cell.verdict))
        for incident in results.faults:
            for span in incident.phases:
                self.phases[key][span.name].append(span.seconds)
        for directory in events.glob("*faulted"):
            for event in read_log(directory).events:
                if event.kind is Kind.STATE_READY and "bytes" in event.data:
                    self.copied[key].append(int(event.data["bytes"]))


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a job goes: on which ``device``, with ``gap`` steps between kills, each of ``pause_s``
    besides its work on the state.
    """

    device: str = "cpu"
    gap: int = 16
    pause_s: float = 0.1


def scenario(strategy: str, mb: float, number: int, course: Course) -> str:
    """One arm as YAML text."""
    steps = course.gap * (PER_ARM + 1)
    draw = random.Random(f"{number}/{mb}")
    kills = "\n".join(
        f"  - {{id: f{place}, kind: process-kill, target: {{rank: {draw.randrange(RANKS)}}},"
        f" at: {{step: {course.gap * (place + 1)}, phase: forward}}}}"
        for place in range(PER_ARM)
    )
    memory = ", memory: {every: 4}" if strategy == "warm" else ""
    return f"""version: 1
name: growth-{strategy}-{mb:g}
seed: {number + 1}
workload:
  kind: script
  params: {{path: {LOOP}, args: ["{mb:g}", "{steps}", "{course.pause_s}"]}}
  device: {course.device}
  ranks: {RANKS}
  steps: {steps}
  global_batch: 4
  determinism: default
  verify_every: 0
  checkpoint: {{every: {steps}{memory}}}
recovery: {STRATEGIES[strategy]}
faults:
{kills}
stop_conditions: [{{when: "no_committed_step_for > 120s"}}]
baseline: none
invariants: {INVARIANTS}
"""


def measure(
    strategy: str, mb: float, number: int, course: Course, runs: Path, growth: Growth
) -> None:
    """Run one arm with real processes."""
    text = scenario(strategy, mb, number, course)
    results = play(f"growth-{strategy}-{mb:g}-{number}", text, runs)
    growth.add((strategy, mb), results, runs / results.scenario / results.run_id / "events")


def tables(growth: Growth) -> str:
    """Markdown: recovery, its phases, and the step."""
    keys = list(growth.recovery)
    spans = list(dict.fromkeys(name for key in keys for name in growth.phases[key]))
    head = ["strategy", "state", "n", "median s", "min-max s", "received", "step ms", *spans]
    rows = [head, ["---"] * len(head)]
    for key in sorted(keys, key=lambda one: (list(STRATEGIES).index(one[0]), one[1])):
        found, steps, copied = growth.recovery[key], growth.steps[key], growth.copied[key]
        whole = sum(size > 0 for size in copied)
        rows.append(
            [
                NAMES[key[0]],
                f"{key[1]:g} MB",
                str(len(found)),
                f"{median(found):.3f}" if found else "-",
                f"{min(found):.3f}-{max(found):.3f}" if found else "-",
                f"{len(copied) - whole} of {len(copied)} nothing" if copied else "all",
                f"{median(steps) * 1e3:.0f}" if steps else "-",
                *(_ms(growth.phases[key].get(span, ())) for span in spans),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ms(values: Sequence[float]) -> str:
    return f"{median(values) * 1e3:.0f} ms" if values else "-"


def plot(recovery: Mapping[Key, Sequence[float]], path: Path) -> None:
    """Recovery against state, both axes logarithmic: medians, and all values as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for strategy in STRATEGIES:
        sizes = sorted(mb for name, mb in recovery if name == strategy and recovery[name, mb])
        if not sizes:
            continue
        middle = [median(recovery[strategy, mb]) for mb in sizes]
        (line,) = axes.plot(sizes, middle, marker="o", label=NAMES[strategy])
        for mb in sizes:
            values = recovery[strategy, mb]
            axes.plot([mb] * len(values), values, ".", color=line.get_color(), alpha=0.4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("state, MB")
    axes.set_ylabel("from the kill to the next step, s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure, and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3, help=f"each with {PER_ARM} kills an arm")
    parser.add_argument("--mb", type=float, nargs="+", default=[4, 40, 400, 2000])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=DEFAULT)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=Course.device)
    parser.add_argument("--gap", type=int, default=Course.gap, help="steps between kills")
    parser.add_argument("--pause", type=float, default=Course.pause_s, help="seconds a step")
    parser.add_argument("--plot", type=Path, help="where to write a picture")
    parser.add_argument("--runs", type=Path, default=Path("runs/growth"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    growth = Growth()
    course = Course(device=options.device, gap=options.gap, pause_s=options.pause)
    try:
        for number in range(options.rounds):
            for mb in options.mb:
                for strategy in options.strategies:
                    measure(strategy, mb, number, course, options.runs, growth)
    except KeyboardInterrupt:
        print("interrupted: what was played until then", file=sys.stderr)
    print(tables(growth), flush=True)
    if options.plot:
        plot(growth.recovery, options.plot)
    bad = [verdict for verdict in growth.verdicts if verdict.lower() != "pass"]
    print(f"{len(growth.verdicts)} arms; verdicts other than pass: {', '.join(bad) or 'none'}")


if __name__ == "__main__":
    main()
