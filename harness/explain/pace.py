"""What a job's own step times say: who computes slowly, who waits for data, and whether the
connections are slow.

Medians over a whole log are the baseline, so that a fault of less than half of a run does not hide
itself. The limits are far above what steps of an unfaulted run differ by (a tenth on an idle
machine) and below what stops nobody; they are not tuned to an exam's faults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log

SLOWER = 2.0
"""Own compute time, in medians of the job's, from which a rank is slow."""
LATE_S = 0.02
"""Seconds above the median from which data are late, and collectives slow: less cannot be told
from the scheduling of a busy host, whose time slices are of a few milliseconds.
"""
TIMES = 3.0
"""And so many medians."""
LASTS, OF = 3, 5
"""In so many of so many steps in a row."""
PAUSE_S = 0.15
"""One collective that all ranks wait in for so long, beyond the median, is an interruption."""

WARMING = 2
"""First steps of a generation, whose collectives wait for connections, and for processes that have
just started: their pauses are of the recovery.
"""

What = Literal["compute", "data", "collective", "pause"]


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """From a step on, something was slow. ``ranks``: who; empty: the connections between all."""

    what: What
    ranks: tuple[int, ...]
    time_ns: int
    step: int


@dataclass(frozen=True, kw_only=True)
class _Step:
    step: int
    time_ns: int
    compute: Mapping[int, float]
    data: Mapping[int, float]
    collective: float
    fresh: bool


def slownesses(log: Log) -> list[Slowness]:
    """What was slow, in order of time; each kind of slowness of the same ranks once."""
    steps = _steps(log)
    if len(steps) < OF:
        return []
    compute = median(value for one in steps for value in one.compute.values())
    data = median(value for one in steps for value in one.data.values())
    collective = median(one.collective for one in steps)
    slow = _lasting(steps, lambda one: _above(one.compute, max(SLOWER * compute, compute + 0.005)))
    late = _lasting(steps, lambda one: _above(one.data, max(TIMES * data, data + LATE_S)))
    limit = max(TIMES * collective, collective + LATE_S)
    found = [*_named("compute", slow), *_named("data", late)]
    busy = {number for one in (slow, late) for numbers in one.values() for number, _ in numbers}
    linked = [one for one in steps if one.collective > limit and one.step not in busy]
    lasting = _runs(steps, {one.step for one in linked})
    if lasting:
        found.append(Slowness(what="collective", ranks=(), time_ns=lasting[1], step=lasting[0]))
    else:
        paused = next(
            (one for one in linked if one.collective > collective + PAUSE_S and not one.fresh), None
        )
        if paused is not None:
            found.append(Slowness(what="pause", ranks=(), time_ns=paused.time_ns, step=paused.step))
    return sorted(found, key=lambda one: one.time_ns)


def _steps(log: Log) -> list[_Step]:
    """Steps as committed last, by all ranks that committed them."""
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in log.of(Kind.STEP_COMMITTED):
        if event.step is not None and isinstance(event.data["seconds"], dict):
            rows[event.generation, event.step].append(event)
    found = []
    begins = {generation: step for generation, step in sorted(rows, reverse=True)}
    for (generation, step), events in sorted(rows.items()):
        by_rank = {int(event.data["rank"]): event.data["seconds"] for event in events}
        found.append(
            _Step(
                step=step,
                time_ns=min(
                    event.time_ns - int(1e9 * sum(event.data["seconds"].values()))
                    for event in events
                ),
                compute={
                    r: s.get("forward", 0.0) + s.get("backward", 0.0) for r, s in by_rank.items()
                },
                data={rank: s.get("data", 0.0) for rank, s in by_rank.items()},
                collective=min(s.get("collective", 0.0) for s in by_rank.values()),
                fresh=step < begins[generation] + WARMING,
            )
        )
    return found


def _above(values: Mapping[int, float], limit: float) -> Iterator[int]:
    return (rank for rank, value in values.items() if value > limit)


def _lasting(
    steps: Sequence[_Step], who: Callable[[_Step], Iterator[int]]
) -> dict[int, list[tuple[int, int]]]:
    """Rank -> the (step, time) at which it was slow, if that lasted."""
    seen: dict[int, list[_Step]] = defaultdict(list)
    for one in steps:
        for rank in who(one):
            seen[rank].append(one)
    return {
        rank: [(one.step, one.time_ns) for one in mine]
        for rank, mine in seen.items()
        if _runs(steps, {one.step for one in mine})
    }


def _runs(steps: Sequence[_Step], which: set[int]) -> tuple[int, int] | None:
    """The first step and its time of those that last; None: they do not."""
    for number in range(len(steps) - OF + 1):
        window = [one for one in steps[number : number + OF] if one.step in which]
        if len(window) >= LASTS:
            return window[0].step, window[0].time_ns
    return None


def _named(what: What, slow: Mapping[int, list[tuple[int, int]]]) -> Iterator[Slowness]:
    """Ranks that were slow at the same time are one slowness."""
    left = dict(slow)
    while left:
        rank, mine = next(iter(left.items()))
        steps = {step for step, _ in mine}
        alike = [r for r, one in left.items() if len(steps & {s for s, _ in one}) * 2 > len(steps)]
        ranks = tuple(sorted({rank, *alike}))
        step, time_ns = min((s, t) for r in ranks for s, t in left[r])
        for one in ranks:
            del left[one]
        yield Slowness(what=what, ranks=ranks, time_ns=time_ns, step=step)
