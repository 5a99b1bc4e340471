"""How long ``chaos analyze`` takes over logs of 10,000 to a million events, and how much memory.

    python -m benchmarks.analysis [--into DIR] [--events N ...]

A simulated job of 16 ranks, two of which are killed, with its control arm; the logs are made in
DIR, a temporary directory if none is given, and kept there for another time. To make a million
events takes the simulator several minutes. Prints the table of docs/performance.md.

Processor time is of the whole command, start of Python included; reading is measured apart, in a
process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.harness import job, machine, markdown, options, spread
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import read_log

SIZES = (10_000, 100_000, 1_000_000)
RANKS = 16
EVENTS_A_STEP = 2 * 2 * RANKS + 4
"""Of both arms: each rank takes a batch and commits; the rest is what checkpoints come with."""
LIMIT_S = 3600
HEAD = ("events", "n", "processor s, median (min to max)", "wall s", "of it reading")
MORE_HEAD = ("µs an event", "reading", "most memory, MB")


def made(events: int, into: Path) -> Path:
    """The directory of a run whose two arms write about so many events, played if it is not there
    yet.
    """
    name = f"analysis-{events}"
    if not (into / name / "latest" / "results.json").is_file():
        steps = max(100, events // EVENTS_A_STEP)
        kills = [
            {"id": f"kill{n}", "kind": "process-kill", "target": {"rank": n}, "at": {"step": step}}
            for n, step in enumerate((steps // 10, steps // 2))
        ]
        scenario = job(name, 1, steps=steps, recovery="hot-spare", faults=kills, baseline="paired")
        shape = {"ranks": RANKS, "steps": steps, "global_batch": 2 * RANKS}
        scenario["workload"] = {"kind": "mlp", **shape, "checkpoint": {"every": 20}}
        path = into / f"{name}.yaml"
        path.write_text(json.dumps({**scenario, "launcher": "sim"}))
        command = [sys.executable, "-m", "trainchaos", "run", str(path), "--runs", str(into), "-q"]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=LIMIT_S)
    return (into / name / "latest").resolve()


def spent(act: Callable[[], object]) -> tuple[float, float, int]:
    """Wall and processor seconds, and most bytes of memory, of ``act`` in a child process that is
    forked for it.
    """
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
    wall_s = os.times().elapsed - before.elapsed
    return wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def read(run: Path) -> int:
    """Read the logs of all arms; returns the number of events."""
    budget = Budget()
    return sum(len(read_log(arm, budget).events) for arm in sorted((run / "events").iterdir()))


def row(events: int, into: Path, times: int) -> list[str]:
    """One row of the table: medians of so many measurements."""
    run = made(events, into)
    count = sum(path.read_bytes().count(b"\n") for path in (run / "events").rglob("*.jsonl"))
    analyze = [sys.executable, "-m", "trainchaos", "analyze", str(run), "-q"]
    idle_s = median(spent(lambda: None)[1] for _ in range(times))
    read_s = median(spent(lambda: read(run))[1] for _ in range(times)) - idle_s
    whole = [spent(lambda: os.execv(sys.executable, analyze)) for _ in range(times)]
    walls, cpus, peaks = zip(*whole, strict=True)
    cells = [f"{count:,}", str(times), spread(cpus, 2), f"{median(walls):.2f}", f"{read_s:.2f}"]
    micros = [f"{1e6 * taken_s / count:.1f}" for taken_s in (median(cpus), read_s)]
    return [*cells, *micros, f"{median(peaks) / 1e6:.0f}"]


def main() -> None:
    """Measure each size and print the table."""
    parser = options(__doc__)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--events", type=int, nargs="*", default=SIZES)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    with ExitStack() as stack:
        away = tempfile.TemporaryDirectory(prefix="chaos-analysis-")
        into = given.into or Path(stack.enter_context(away))
        into.mkdir(parents=True, exist_ok=True)
        rows = [row(events, into, given.times) for events in given.events]
    print(f"{machine()}, {RANKS} ranks, two arms\n\n{markdown([*HEAD, *MORE_HEAD], rows)}")


if __name__ == "__main__":
    main()
