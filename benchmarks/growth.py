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
from pathlib import Path
from statistics import median

from benchmarks.harness import Measured, Tree, in_ms, job, markdown, options, play, spread
from trainchaos.chaos.events.log import Kind, read_log

RANKS, PER_ARM = 2, 3
STRATEGIES = {
    "live": ("hot-spare, sync: live", {"strategy": "hot-spare", "sync": "live"}),
    "rehearsed": (
        "hot-spare, sync: live, rehearse: true",
        {"strategy": "hot-spare", "sync": "live", "rehearse": True},
    ),
    "none": ("hot-spare, sync: none", {"strategy": "hot-spare"}),
    "drop": ("drop-replica", {"strategy": "drop-replica"}),
    "warm": ("checkpoint-restart warm, from memory", {"strategy": "checkpoint-restart"}),
}
"""Name -> its words, and what a scenario says."""
INVARIANTS = ["fault-landed", "sample-accounting", "no-lost-commit", "liveness", "no-orphans"]
LOOP = Path(__file__).parent / "loops" / "large_state.py"
Key = tuple[str, float]
"""A strategy, and a size in MB."""


def scenario(key: Key, number: int, given: argparse.Namespace) -> Tree:
    """One arm: ``gap`` steps between kills, each of ``pause`` seconds besides its work."""
    (strategy, mb), steps = key, given.gap * (PER_ARM + 1)
    draw = random.Random(f"{number}/{mb}")
    saves: Tree = {"every": steps} | ({"memory": {"every": 4}} if strategy == "warm" else {})
    made = job(
        f"growth-{strategy}-{mb:g}",
        number + 1,
        steps=steps,
        recovery=STRATEGIES[strategy][1],
        faults=[
            {
                "id": f"f{place}",
                "kind": "process-kill",
                "target": {"rank": draw.randrange(RANKS)},
                "at": {"step": given.gap * (place + 1), "phase": "forward"},
            }
            for place in range(PER_ARM)
        ],
        invariants=[*INVARIANTS, "evidence-complete"],
        stop_conditions=[{"when": "no_committed_step_for > 120s"}],
    )
    made["workload"] = {
        "kind": "script",
        "params": {"path": str(LOOP), "args": [f"{mb:g}", str(steps), str(given.pause)]},
        "device": given.device,
        "ranks": RANKS,
        "steps": steps,
        "global_batch": 4,
        "determinism": "default",
        "verify_every": 0,
        "checkpoint": saves,
    }
    return made


def received(events: Path) -> list[int]:
    """Bytes that each new member received."""
    return [
        int(event.data["bytes"])
        for arm in events.glob("*faulted")
        for event in read_log(arm).of(Kind.STATE_READY)
        if "bytes" in event.data
    ]


def table(measured: Measured, copied: Mapping[Key, Sequence[int]]) -> str:
    """Recovery, its phases, and the step."""
    spans = list(dict.fromkeys(name for of in measured.phases.values() for name in of))
    head = ["strategy", "state", "n", "median (range), s", "received", "step ms", *spans]
    rows = []
    for key in sorted(measured.recovery, key=lambda key: (list(STRATEGIES).index(key[0]), key[1])):
        found, steps, sizes = measured.recovery[key], measured.steps[key], copied[key]
        whole = sum(size > 0 for size in sizes)
        cells = [STRATEGIES[key[0]][0], f"{key[1]:g} MB", str(len(found)), spread(found)]
        cells.append(f"{len(sizes) - whole} of {len(sizes)} nothing" if sizes else "all")
        cells.append(f"{median(steps) * 1e3:.0f}" if steps else "-")
        rows.append([*cells, *(in_ms(measured.phases[key].get(span, ())) for span in spans)])
    return markdown(head, rows)


def plot(recovery: Mapping[Key, Sequence[float]], path: Path) -> None:
    """Recovery against state, both axes logarithmic: medians, and all values as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for strategy, (words, _) in STRATEGIES.items():
        of = {mb: recovery[name, mb] for name, mb in sorted(recovery) if name == strategy}
        if of := {mb: values for mb, values in of.items() if values}:
            middle = [median(values) for values in of.values()]
            (line,) = axes.plot(list(of), middle, marker="o", label=words)
            for mb, values in of.items():
                axes.plot([mb] * len(values), values, ".", color=line.get_color(), alpha=0.4)
    axes.set(xscale="log", yscale="log", xlabel="state, MB")
    axes.set_ylabel("from the kill to the next step, s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure, and print Markdown tables."""
    parser = options(__doc__, runs="runs/growth")
    add = parser.add_argument
    add("--rounds", type=int, default=3, help=f"each with {PER_ARM} kills an arm")
    add("--mb", type=float, nargs="+", default=[4, 40, 400, 2000])
    usual = ["live", "none", "drop", "warm"]
    add("--strategies", nargs="+", choices=STRATEGIES, default=usual)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--gap", type=int, default=16, help="steps between kills")
    add("--pause", type=float, default=0.1, help="seconds a step")
    add("--plot", type=Path, help="where to write a picture")
    given = parser.parse_args()
    measured, copied = Measured(), defaultdict[Key, list[int]](list)
    keys = [(strategy, mb) for mb in given.mb for strategy in given.strategies]
    try:
        for number in range(given.rounds):
            for key in keys:
                made = scenario(key, number, given)
                results = play(f"{made['name']}-{number}", made, given.runs)
                measured.add(results, lambda _, key=key: key)  # type: ignore[misc]
                copied[key] += received(given.runs / results.scenario / results.run_id / "events")
    except KeyboardInterrupt:
        print("interrupted: what was played until then", file=sys.stderr)
    print(table(measured, copied), flush=True)
    if given.plot:
        plot(measured.recovery, given.plot)
    print(measured.verdict_line())


if __name__ == "__main__":
    main()
