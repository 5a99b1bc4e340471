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
from trainchaos.recovery.process.pressure import MOST_RANKS, PressureReader


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
        acts: dict[str, Callable[[], object]] = {
            "`beacon.step`": lambda: beacon.step(1, loss=0.5, samples=16),
            "`beacon.point`, nothing armed": lambda: beacon.point("optimizer", 7),
            f"a reading of processors, {MOST_RANKS} ranks": lambda: reader.read(pids),
        }
        for words, act in acts.items():
            took_ns = []
            for _ in range(repeats):
                began_ns = time.thread_time_ns()
                act()
                took_ns.append(time.thread_time_ns() - began_ns)
            rows.append([words, spread(took_ns, 1, 1e-3)])
        points.close()
    print(markdown([f"n = {repeats}", "us, median (min to max)"], rows))


if __name__ == "__main__":
    main()
