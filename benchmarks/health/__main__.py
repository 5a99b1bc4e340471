"""What the detectors of health find, how soon, and how often they are wrong.

    python -m benchmarks.health [--seed 1] [--part 1.0] [--n 100] [--only NAME ...] [--jobs 2]
    python -m benchmarks.health --archives docs/results/published*.tar.xz

Series are generated : without an anomaly, for the rate of false alarms, and
with one of several sizes. Prints a Markdown table. ``--part``: of the hours without an anomaly.
Exits with 1 if a rate is more than its detector states (lower 95 % bound). ``--archives``: instead,
the logs of real runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.harness import markdown, options
from benchmarks.health import stored
from benchmarks.health.cases import CASES, Null, Planted, null, planted
from trainchaos.chaos.stats import percentile
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
    rates, sizes = [], []
    for name, (without, of_sizes) in found.items():
        stated = f"{CASES[name].make().rate:g}{'' if within(name, without) else ' EXCEEDED'}"
        figures = [f"{without.rate:.2g}", f"{without.upper:.2g}", stated]
        rates.append([name, f"{without.alarms} / {without.hours:.0f}", *figures])
        for size, of in of_sizes.items():
            delays = of.delays_s
            said = len(delays) + of.wrong
            cells = [name, CASES[name].sizes[size], of.n, f"{len(delays) / of.n:.0%}", "-", "-"]
            if delays:
                cells[4:] = [f"{median(delays):.1f}", f"{percentile(delays, 0.95):.1f}"]
            sizes.append([*cells, f"{len(delays) / said:.0%}" if said else "-"])
    head = ["detector", "false alarms / series-hours", "rate, 1/h", "95 % bound, 1/h", "states"]
    more = ["detector", "anomaly", "n", "found", "after, s: median", "95th percentile", "precision"]
    return f"{markdown(head, rates)}\n\n{markdown(more, sizes)}"


def main() -> None:
    """Evaluate all, and print the tables."""
    parser = options(__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=1)
    add("--part", type=float, default=1.0, help="of the hours without an anomaly")
    add("--n", type=int, default=100, help="anomalies of each size")
    add("--only", nargs="*", default=list(CASES), choices=list(CASES))
    add("--jobs", type=int, default=2)
    add("--archives", nargs="+", type=Path, default=[], help="of comparisons")
    given = parser.parse_args()
    if given.archives:
        print(stored.table(stored.played(given.archives)))
        return
    began_s = time.monotonic()
    with ProcessPoolExecutor(given.jobs, None, tied, (os.getpid(),)) as pool:
        waiting = {
            name: pool.submit(evaluate, name, given.seed, given.part, given.n)
            for name in given.only
        }
        found = {name: future.result(timeout=7200) for name, future in waiting.items()}
    print(table(found))
    print(f"\nseed {given.seed}; {time.monotonic() - began_s:.0f} s")
    for name, (without, _) in found.items():
        if without.names:
            counts = dict(sorted(Counter(without.names).items()))
            print(f"{name}: false alarms by weather: {counts}", file=sys.stderr)
    sys.exit(0 if all(within(name, without) for name, (without, _) in found.items()) else 1)


if __name__ == "__main__":
    main()
