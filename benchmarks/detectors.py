"""What the detectors of health find, how soon, and how often they are wrong.

    python -m benchmarks.detectors [--seed 1] [--part 1.0] [--n 100] [--only NAME ...] [--jobs 2]
    python -m benchmarks.detectors --archives docs/results/published*.tar.xz

Series are generated (``benchmarks.health``): without an anomaly, for the rate of false alarms, and
with one of several sizes. Prints a Markdown table. ``--part``: of the hours without an anomaly.
Exits with 1 if a rate is more than its detector states (lower 95 % bound). ``--archives``: instead,
the logs of real runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.health import stored
from benchmarks.health.cases import CASES
from benchmarks.health.evaluate import Null, Planted, null, planted
from trainchaos.harness.fuzz.play.child import tied

Found = tuple[Null, Mapping[float, Planted]]


def evaluate(name: str, seed: int, part: float, n: int) -> Found:
    """One detector."""
    case = CASES[name]
    sizes = {size: planted(case, seed, size, n) for size in case.sizes}
    return null(case, seed, case.hours * part), sizes


def within(name: str, found: Null) -> bool:
    """Whether the rate of false alarms may be what the detector states."""
    return found.surely_over <= CASES[name].make().rate


def table(found: Mapping[str, Found]) -> str:
    """Two tables as Markdown: false alarms, and anomalies by size."""
    rows = [["detector", "false alarms / series-hours", "rate, 1/h", "95 % bound, 1/h", "states"]]
    rows.append(["---"] * len(rows[0]))
    for name, (without, _) in found.items():
        stated = CASES[name].make().rate
        rows.append(
            [
                name,
                f"{without.alarms} / {without.hours:.0f}",
                f"{without.rate:.2g}",
                f"{without.upper:.2g}",
                f"{stated:g}" + ("" if within(name, without) else " EXCEEDED"),
            ]
        )
    head = ["detector", "anomaly", "n", "found", "after, s: median", "95th percentile", "precision"]
    sizes = [head, ["---"] * len(head)]
    for name, (_, of_sizes) in found.items():
        for size, one in of_sizes.items():
            delays = sorted(one.delays_s)
            said = len(delays) + one.wrong
            sizes.append(
                [
                    name,
                    CASES[name].sizes[size],
                    str(one.n),
                    f"{one.found / one.n:.0%}",
                    f"{median(delays):.1f}" if delays else "-",
                    f"{percentile(delays, 0.95):.1f}" if delays else "-",
                    f"{len(delays) / said:.0%}" if said else "-",
                ]
            )
    return "\n\n".join(_markdown(one) for one in (rows, sizes))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so many do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Evaluate all, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=float, default=1.0, help="of the hours without an anomaly")
    parser.add_argument("--n", type=int, default=100, help="anomalies of each size")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--archives", nargs="+", type=Path, default=[], help="of comparisons")
    options = parser.parse_args()
    if options.archives:
        print(stored.table(stored.unpacked(options.archives)))
        return
    began_s = time.monotonic()
    with ProcessPoolExecutor(options.jobs, None, tied, (os.getpid(),)) as pool:
        waiting = {
            name: pool.submit(evaluate, name, options.seed, options.part, options.n)
            for name in options.only
        }
        found = {name: future.result(timeout=7200) for name, future in waiting.items()}
    print(table(found))
    print(f"\nseed {options.seed}; {time.monotonic() - began_s:.0f} s")
    for name, (without, _) in found.items():
        if without.names:
            counts = {one: without.names.count(one) for one in sorted(set(without.names))}
            print(f"{name}: false alarms by weather: {counts}", file=sys.stderr)
    sys.exit(0 if all(within(name, without) for name, (without, _) in found.items()) else 1)


if __name__ == "__main__":
    main()
