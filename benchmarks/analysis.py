"""How long ``chaos analyze`` takes over logs of 10,000 to a million events, and how much memory.

    python -m benchmarks.analysis [--into DIR] [--events N ...]

A simulated job of 16 ranks, two of which are killed, with its control arm; the logs are made in
DIR, a temporary directory if none is given, and kept there for another time. To make a million
events takes the simulator several minutes. Prints the table of docs/performance.md.

Processor time is of the whole command, start of Python included; reading is measured apart, in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import read_log
from trainchaos.harness.launch.devices import describe

SIZES = (10_000, 100_000, 1_000_000)
RANKS = 16
EVENTS_A_STEP = 2 * 2 * RANKS + 4
"""Of both arms: each rank takes a batch and commits; the rest is what checkpoints come with."""
TIMES = 3
LIMIT_S = 3600


@dataclass(frozen=True, kw_only=True)
class Spent:
    """By one process: wall and processor time in seconds, most memory in bytes."""

    wall_s: float
    cpu_s: float
    peak: int


def scenario(events: int) -> str:
    """A job whose two arms write about so many events."""
    steps = max(100, events // EVENTS_A_STEP)
    faults = [
        {"id": f"kill{n}", "kind": "process-kill", "target": {"rank": n}, "at": {"step": step}}
        for n, step in enumerate((steps // 10, steps // 2))
    ]
    body = {
        "version": 1,
        "name": f"analysis-{events}",
        "seed": 1,
        "launcher": "sim",
        "workload": {
            "kind": "mlp",
            "ranks": RANKS,
            "steps": steps,
            "global_batch": 2 * RANKS,
            "checkpoint": {"every": 20},
        },
        "recovery": {"strategy": "hot-spare"},
        "baseline": "paired",
        "faults": faults,
    }
    return json.dumps(body)


def made(events: int, into: Path) -> Path:
    """The run directory, made if it is not there yet."""
    runs = into / f"analysis-{events}"
    if not (runs / "latest" / "results.json").is_file():
        path = into / f"analysis-{events}.yaml"
        path.write_text(scenario(events))
        command = [sys.executable, "-m", "trainchaos", "run", str(path), "--runs", str(into), "-q"]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=LIMIT_S)
    return (runs / "latest").resolve()


def spent(act: Callable[[], object]) -> Spent:
    """What ``act`` takes in a child process that is forked for it."""
    before = os.times()
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
    _, status, used = os.wait4(child, 0)
    if status:
        raise RuntimeError("what was measured failed")
    return Spent(
        wall_s=os.times().elapsed - before.elapsed,
        cpu_s=used.ru_utime + used.ru_stime,
        peak=used.ru_maxrss * 1024,
    )


def analysed(run: Path) -> Spent:
    """``chaos analyze`` of a run."""
    command = [sys.executable, "-m", "trainchaos", "analyze", str(run), "-q"]
    return spent(lambda: os.execv(sys.executable, command))


def read(run: Path) -> int:
    """Read the logs of all arms; returns the number of events."""
    budget = Budget()
    logs = [read_log(folder, budget) for folder in sorted((run / "events").iterdir())]
    return sum(len(log.events) for log in logs)


def row(events: int, into: Path, times: int) -> list[str]:
    """One row of the table: medians of so many measurements."""
    run = made(events, into)
    count = sum(
        line_count(path) for folder in (run / "events").iterdir() for path in folder.glob("*.jsonl")
    )
    idle = median(spent(lambda: None).cpu_s for _ in range(times))
    reading = [spent(lambda: read(run)) for _ in range(times)]
    whole = [analysed(run) for _ in range(times)]
    cpu_s, read_s = (median(one.cpu_s for one in found) for found in (whole, reading))
    low, high = min(one.cpu_s for one in whole), max(one.cpu_s for one in whole)
    peak = median(one.peak for one in whole)
    return [
        f"{count:,}",
        str(times),
        f"{cpu_s:.2f} ({low:.2f}-{high:.2f})",
        f"{median(one.wall_s for one in whole):.2f}",
        f"{read_s - idle:.2f}",
        f"{1e6 * cpu_s / count:.1f}",
        f"{1e6 * (read_s - idle) / count:.1f}",
        f"{peak / 1e6:.0f}",
    ]


def line_count(path: Path) -> int:
    """Lines of a file."""
    with path.open("rb") as stream:
        return sum(1 for _ in stream)


HEAD = [
    "events",
    "n",
    "processor s, median (min-max)",
    "wall s",
    "of it reading",
    "µs an event",
    "reading",
    "most memory, MB",
]


def main(given: Sequence[str] | None = None) -> int:
    """Measure each size and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path)
    parser.add_argument("--events", type=int, nargs="*", default=SIZES)
    parser.add_argument("--times", type=int, default=TIMES)
    options = parser.parse_args(given)
    with ExitStack() as stack:
        into = options.into or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-analysis-"))
        )
        into.mkdir(parents=True, exist_ok=True)
        rows = [row(events, into, options.times) for events in options.events]
    print(f"{describe()['cores']} cores, {RANKS} ranks, two arms\n")
    for cells in (HEAD, ["---"] * len(HEAD), *rows):
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
