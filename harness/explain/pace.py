"""What a job's own step times say: who computes slowly, who waits for data, and whether the
connections are slow.

Medians over a whole log are the baseline, so that a fault of less than half of a run does not hide
itself. The limits are far above what steps of an unfaulted run differ by (a tenth on an idle
machine) and below what stops nobody; they are not tuned to an exam's faults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log

LATE_S = 0.02
"""Seconds above the median from which data are late, and collectives slow: less cannot be told
from the scheduling of a busy host, whose time slices are of a few milliseconds.
"""
TIMES = 3.0
"""And so many medians."""
BY_RANK: Mapping[Literal["compute", "data"], tuple[float, float]] = {
    "compute": (2.0, 0.005),
    "data": (TIMES, LATE_S),
}
"""Medians of the job's times, and seconds above the median, from which a rank is slow."""
LASTS, OF = 3, 5
"""In so many of so many steps in a row."""
PAUSE_S = 0.15
"""One collective that all ranks wait in for so long, beyond the median, is an interruption."""
WARMING = 2
"""First steps of a generation, whose collectives wait for connections, and for processes that have
just started: their pauses are of the recovery.
"""


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """From a step on, something was slow. ``ranks``: who; empty: the connections between all."""

    what: Literal["compute", "data", "collective", "pause"]
    ranks: tuple[int, ...]
    time_ns: int
    step: int


@dataclass(frozen=True, kw_only=True)
class _Step:
    """``seconds``: compute and data, by rank."""

    step: int
    time_ns: int
    seconds: Mapping[str, Mapping[int, float]]
    collective: float
    fresh: bool


def slownesses(log: Log) -> list[Slowness]:
    """What was slow, in order of time; each kind of slowness of the same ranks once."""
    steps = _steps(log)
    if len(steps) < OF:
        return []
    found: list[Slowness] = []
    busy: set[int] = set()
    for what, (times, late_s) in BY_RANK.items():
        usual = median(value for one in steps for value in one.seconds[what].values())
        slow: dict[int, list[_Step]] = defaultdict(list)
        for one in steps:
            for rank, value in one.seconds[what].items():
                if value > max(times * usual, usual + late_s):
                    slow[rank].append(one)
        slow = {rank: mine for rank, mine in slow.items() if _lasting(steps, mine)}
        busy |= {one.step for mine in slow.values() for one in mine}
        for ranks, first in _together(slow):
            found.append(Slowness(what=what, ranks=ranks, time_ns=first.time_ns, step=first.step))
    usual = median(one.collective for one in steps)
    limit = max(TIMES * usual, usual + LATE_S)
    linked = [one for one in steps if one.collective > limit and one.step not in busy]
    lasting = _lasting(steps, linked)
    pauses = (one for one in linked if one.collective > usual + PAUSE_S and not one.fresh)
    if (begun := lasting or next(pauses, None)) is not None:
        kind: Literal["collective", "pause"] = "collective" if lasting else "pause"
        found.append(Slowness(what=kind, ranks=(), time_ns=begun.time_ns, step=begun.step))
    return sorted(found, key=lambda one: one.time_ns)


def _steps(log: Log) -> list[_Step]:
    """Steps of each generation, by all ranks that committed them."""
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in log.of(Kind.STEP_COMMITTED):
        if event.step is not None and isinstance(event.data["seconds"], dict):
            rows[event.generation, event.step].append(event)
    begins = {generation: step for generation, step in sorted(rows, reverse=True)}
    found = []
    for (generation, step), events in sorted(rows.items()):
        took = {int(event.data["rank"]): event.data["seconds"] for event in events}
        compute = {r: s.get("forward", 0.0) + s.get("backward", 0.0) for r, s in took.items()}
        data = {rank: s.get("data", 0.0) for rank, s in took.items()}
        begun = (e.time_ns - int(1e9 * sum(e.data["seconds"].values())) for e in events)
        found.append(
            _Step(
                step=step,
                time_ns=min(begun),
                seconds={"compute": compute, "data": data},
                collective=min(s.get("collective", 0.0) for s in took.values()),
                fresh=step < begins[generation] + WARMING,
            )
        )
    return found


def _lasting(steps: Sequence[_Step], which: Sequence[_Step]) -> _Step | None:
    """The first of those that last; None: they do not."""
    numbers = {one.step for one in which}
    for number in range(len(steps) - OF + 1):
        window = [one for one in steps[number : number + OF] if one.step in numbers]
        if len(window) >= LASTS:
            return window[0]
    return None


def _together(slow: Mapping[int, Sequence[_Step]]) -> Iterator[tuple[tuple[int, ...], _Step]]:
    """Ranks that were slow at the same time, and the first step at which one of them was."""
    left = {rank: {one.step for one in mine} for rank, mine in slow.items()}
    while left:
        rank, mine = next(iter(left.items()))
        alike = [r for r, steps in left.items() if r == rank or len(mine & steps) * 2 > len(mine)]
        first = min(
            (one for r in alike for one in slow[r]), key=lambda one: (one.step, one.time_ns)
        )
        yield tuple(sorted(alike)), first
        for r in alike:
            del left[r]
