"""What a call in a training loop costs the script, and a look at the machine the supervisor.

    python -m benchmarks.calls [--repeats 2000]

Processor time of one thread, by call: median and least of so many. The tests bound the number of
calls behind each instead (``tests/support/costs.py``), which no busy machine changes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from trainchaos.chaos import beacon
from trainchaos.harness.script.points import Points
from trainchaos.recovery.process.pressure import MOST_RANKS, PressureReader


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "beacon").touch()
        points = Points(folder / "points", [(7, "backward")])
        os.environ |= {
            beacon.VARIABLE: str(folder / "beacon"),
            beacon.POINTS: str(folder / "points"),
            "RANK": "0",
        }
        reader, pids = PressureReader(), {f"w{n}": os.getpid() for n in range(MOST_RANKS)}
        acts: dict[str, Callable[[], object]] = {
            "`beacon.step`": lambda: beacon.step(1, loss=0.5, samples=16),
            "`beacon.point`, nothing armed": lambda: beacon.point("optimizer", 7),
            f"a reading of processors, {MOST_RANKS} ranks": lambda: reader.read(pids),
        }
        print(f"| n = {repeats} | median | least |\n| --- | --- | --- |")
        for words, act in acts.items():
            took_us = []
            for _ in range(repeats):
                began_ns = time.thread_time_ns()
                act()
                took_us.append((time.thread_time_ns() - began_ns) / 1e3)
            print(f"| {words} | {median(took_us):.1f} us | {min(took_us):.1f} us |")
        points.close()


if __name__ == "__main__":
    main()
