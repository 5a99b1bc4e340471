"""What a call in a training loop costs the script, and a look at the machine the supervisor.

    python -m benchmarks.calls [--repeats 2000]

Processor time of one thread, by call: median and range of so many. The tests bound the number of
calls behind each instead (``tests/support/costs.py``), which no busy machine changes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import markdown, options, spread
from trainchaos.chaos import beacon
from trainchaos.harness.script.points import Points
from trainchaos.recovery.health.monitor import Monitor
from trainchaos.recovery.health.readings.reports import ReportFile
from trainchaos.recovery.health.sources.host import HostSource
from trainchaos.recovery.health.sources.job import JobSource
from trainchaos.recovery.health.sources.reported import ReportedSource
from trainchaos.recovery.process.pressure import MOST_RANKS, PressureReader

RANKS, STEPS_A_SECOND = 8, 25
PHASES = ("data", "forward", "backward", "collective", "optimizer")


def health(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """A second of steps of 8 ranks; and a read of them, of the host and of reports."""
    job = JobSource()
    monitor = Monitor(
        sources=[HostSource(disks={"data": folder}), job, ReportedSource(ReportFile(folder / "h"))]
    )
    step = {"samples": 8, "loss": 1.0, "grad_norm": 1.0, "seconds": dict.fromkeys(PHASES, 0.01)}
    second = 0

    def train() -> None:
        nonlocal second
        second += 1
        for number in range(STEPS_A_SECOND):
            for rank in range(RANKS):
                at_s = second + number / STEPS_A_SECOND
                job.committed({**step, "rank": rank}, second * STEPS_A_SECOND + number, at_s)

    return train, lambda: monitor.poll(float(second))


def main() -> None:
    """Print a Markdown table."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "beacon").touch()
        points = Points(folder / "points", [(7, "backward")])
        files = {beacon.VARIABLE: str(folder / "beacon"), beacon.POINTS: str(folder / "points")}
        os.environ |= {**files, "RANK": "0"}
        reader, pids = PressureReader(), {f"w{n}": os.getpid() for n in range(MOST_RANKS)}
        train, read = health(folder)
        health_words = f"a read of health, {RANKS} ranks at {STEPS_A_SECOND} steps a second"
        acts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "`beacon.step`": (int, lambda: beacon.step(1, loss=0.5, samples=16)),
            "`beacon.point`, nothing armed": (int, lambda: beacon.point("optimizer", 7)),
            f"a reading of processors, {MOST_RANKS} ranks": (int, lambda: reader.read(pids)),
            health_words: (train, read),
        }
        for words, (before, act) in acts.items():
            took_ns = []
            for _ in range(repeats):
                before()
                began_ns = time.thread_time_ns()
                act()
                took_ns.append(time.thread_time_ns() - began_ns)
            rows.append([words, spread(took_ns, 1, 1e-3)])
        points.close()
    print(markdown([f"n = {repeats}", "us, median (min to max)"], rows))


if __name__ == "__main__":
    main()
