"""Clocks that run at a different rate than the others."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from trainchaos.harness.judge.record.history import NS, History, StepRun

DRIFT_STEPS = 40


DRIFT_RATE = 4e-3


DRIFT_S = 0.010
"""A clock runs wrong if its rank's commits drift away from the others', by at least DRIFT_RATE and
DRIFT_S in total, over DRIFT_STEPS steps; evenly (``_EVEN``), and far beyond the noise of single
steps (``_CLEAR``).
"""


_EVEN = 2.5


_CLEAR = 8.0


def drifts(history: History) -> list[str]:
    """Ranks whose clock runs at a different rate: their commits drift away from the others' commits
    of the same steps.
    """
    # rank's process -> (others' time, own time minus others')
    commits: dict[str, list[tuple[int, int]]] = defaultdict(list)
    # no shift is more than twice the longest time between two commits of a step
    if 2 * max(map(_spread_ns, history.runs), default=0) < DRIFT_S * NS:
        return []
    for run in history.runs:
        times = dict(zip(run.done.actors, run.done.times, strict=True))
        ordered = sorted(times.values())
        for name, time_ns in times.items() if len(ordered) > 1 else ():
            middle = _median_of_others(ordered, time_ns)
            commits[name].append((middle, time_ns - middle))
    bounds = history.log.clock_bounds_s
    found = []
    for name, rows in commits.items():
        rate = _rate(rows, slack_ns=2 * max(bounds.values(), default=0.0) * NS)
        if rate is not None:
            found.append(
                (
                    abs(rate),
                    f"the clock of {name} runs {rate:+.2%} against those of the other ranks",
                )
            )
    # One wrong clock makes the others seem wrong too, but less so: report only the worst.
    return [max(found)[1]] if found else []


def _spread_ns(run: StepRun) -> int:
    return max(run.done.times, default=0) - min(run.done.times, default=0)


def _median_of_others(ordered: Sequence[int], own: int) -> int:
    """The rounded median without one of ``own``, found without a list of the others."""
    count, place = len(ordered) - 1, bisect_left(ordered, own)

    def other(index: int) -> int:
        return ordered[index if index < place else index + 1]

    if count % 2:
        return other(count // 2)
    return round((other(count // 2 - 1) + other(count // 2)) / 2)


def _rate(rows: Sequence[tuple[int, int]], *, slack_ns: float) -> float | None:
    """The rate at which the second numbers change with the first, if they change evenly and far
    beyond the noise; else None.
    """
    if len(rows) < DRIFT_STEPS:
        return None
    size = len(rows) // 4
    ordered = sorted(rows)
    parts = [ordered[index * size : (index + 1) * size] for index in range(4)]
    middles = [
        (statistics.median(x for x, _ in part), statistics.median(y for _, y in part))
        for part in parts
    ]
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else 0.0
        for a, b in itertools.pairwise(middles)
    ]
    low, high = sorted(map(abs, slopes))[:: len(slopes) - 1]
    shift_ns = abs(middles[-1][1] - middles[0][1])
    even = low >= DRIFT_RATE and high <= _EVEN * low and len({slope > 0 for slope in slopes}) == 1
    if not even or shift_ns < DRIFT_S * NS + slack_ns:
        return None
    rate = (middles[-1][1] - middles[0][1]) / (middles[-1][0] - middles[0][0])
    rest = [abs(y - middles[0][1] - rate * (x - middles[0][0])) for x, y in rows]
    return rate if statistics.median(rest) * _CLEAR < shift_ns else None
