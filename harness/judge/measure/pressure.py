"""How short of processors an arm was while it trained, and how much that slowed it.

The harness reads two counters of the training threads of the arm's ranks: time running, and time in
a run queue. Ranks that share too few processors wait for each other on a quiet machine too. So only
a longer wait *per second of running*, relative to the steps of comparison, excuses anything. A job
that computes more than it should waits more in total but not per second; one that sleeps does not
wait at all. Neither is excused by a constant load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from trainchaos.chaos.planning.load import WORTH_SAYING

TOO_BUSY = "the machine was too busy: "
"""Prefix of a finding that a quieter machine would decide."""
NS = 1e9
LEAST_S = 0.3
LEAST_SHARE = 0.4
"""Share of an interval that readings must cover."""
LONGEST_S = 3.0
"""Longest gap between two readings: in a longer one the job did something other than train."""
LIMIT = 0.25
"""Largest share of a step that pressure may excuse in a verdict; beyond that the true step time is
unknowable.
"""
MARGIN = 1.25
"""Factor by which the real wait may exceed the counted one: other threads than the training one
wait too.
"""


UNSTEADY = 0.5
"""Variation of the wait from one second to the next, as a share of it: few steps are compared with
many.
"""


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """Pressure over an interval of an arm, per second of it. ``ran``, ``queued``: mean number of
    ranks running, and in a run queue; ``steal``: per processor; ``cpus``: number of processors.
    """

    ran: float
    queued: float
    steal: float
    cpus: float

    @property
    def wait(self) -> float:
        """Seconds in a queue per second that a rank ran."""
        return self.queued / self.ran if self.ran > 0 else 0.0

    @property
    def wanting(self) -> float:
        """Mean number of ranks that wanted a processor, at least one."""
        return max(1.0, self.ran + self.queued)


@dataclass(frozen=True, kw_only=True)
class ExtraCpuWait:
    """How much longer a step waited for a processor than the step it is compared with, in seconds:
    most likely, and at most.
    """

    likely_s: float
    most_s: float


@dataclass(frozen=True, kw_only=True)
class _Reading:
    node: int
    time_ns: int
    generation: int
    cpus: float
    steal_s: float | None
    ranks: Mapping[str, tuple[float, float]]


def pressures_of(
    log: Log, start_ns: int, end_ns: int, apart: Sequence[tuple[int, int]] = ()
) -> dict[int, Pressure]:
    """Pressure in an interval of an arm by node (0: also the harness's machine), without nodes that
    have too few readings. ``apart``: disjoint parts of the interval that do not count, as (from,
    until) in ns; pairs of readings mostly in them are left out.
    """
    by_node: dict[int, list[_Reading]] = {}
    for event in log.of(Kind.PRESSURE_READ):
        if (read := _reading(event)) is not None:
            by_node.setdefault(read.node, []).append(read)
    found = {
        node: _pressure(readings, start_ns, end_ns, apart) for node, readings in by_node.items()
    }
    return {node: pressure for node, pressure in found.items() if pressure is not None}


def _pressure(
    found: Sequence[_Reading], start_ns: int, end_ns: int, apart: Sequence[tuple[int, int]]
) -> Pressure | None:
    """Pressure from the readings of one node; None if they cover too little."""
    readings = sorted(found, key=lambda one: one.time_ns)
    first = max((n for n, one in enumerate(readings) if one.time_ns <= start_ns), default=0)
    last = min(
        (n for n, one in enumerate(readings) if one.time_ns >= end_ns), default=len(readings) - 1
    )
    stretch = [
        (a, b)
        for a, b in itertools.pairwise(readings[first : last + 1])
        if a.generation == b.generation
        and a.ranks
        and a.ranks.keys() == b.ranks.keys()
        and 0 < b.time_ns - a.time_ns <= LONGEST_S * NS
    ]
    pairs = [
        (a, b)
        for a, b in stretch
        if 2 * _within(apart, a.time_ns, b.time_ns) <= b.time_ns - a.time_ns
    ]
    seconds = _seconds(pairs)
    counted_ns = end_ns - start_ns - _within(apart, start_ns, end_ns)
    if seconds < max(LEAST_S, LEAST_SHARE * counted_ns / NS):
        return None
    cpus = max(b.cpus for _, b in pairs)
    ran, queued = _counted(pairs)
    # A wait is counted when it ends, so part of it may lie before these readings.
    queued = {name: min(waited, max(0.0, seconds - ran[name])) for name, waited in queued.items()}
    steal, steal_over = _grown([(a, b, a.steal_s, b.steal_s) for a, b in pairs])
    return Pressure(
        ran=sum(ran.values()) / seconds,
        queued=sum(queued.values()) / seconds,
        cpus=cpus,
        steal=steal / steal_over / cpus if steal_over else 0.0,
    )


def _seconds(pairs: Sequence[tuple[_Reading, _Reading]]) -> float:
    return sum(b.time_ns - a.time_ns for a, b in pairs) / NS


def _counted(
    pairs: Sequence[tuple[_Reading, _Reading]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that each rank ran, and stood in a queue, between the readings of these pairs."""
    ran, queued = (
        {
            name: sum(b.ranks[name][n] - a.ranks[name][n] for a, b in pairs if name in a.ranks)
            for name in _names(pairs)
        }
        for n in (0, 1)
    )
    return ran, queued


def _within(spans: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in spans)


def excuse(ideal_s: float, step_s: float, ideal: Pressure, now: Pressure) -> ExtraCpuWait:
    """How much of a step of ``step_s`` is excused relative to one of ``ideal_s`` under other
    pressure.

    In the ideal step all ranks together run for ``ideal.ran * ideal_s``. Each second of that waits
    longer by the difference of the two ``wait``, and as many ranks wait at a time as want a
    processor at a time.
    """
    waited = ideal.ran * ideal_s * max(0.0, now.wait - ideal.wait)
    at_once = sorted((ideal.wanting, now.wanting))
    stolen = max(0.0, now.steal - ideal.steal) * step_s
    unsteady = UNSTEADY * ideal.ran * ideal_s * now.wait / ideal.wanting
    return ExtraCpuWait(
        likely_s=min(step_s, waited / at_once[1] + stolen),
        most_s=min(step_s, MARGIN * (waited / at_once[0] + stolen * now.cpus) + unsteady),
    )


def _reading(event: Event) -> _Reading | None:
    """The event as a reading; None if its values make no sense."""
    data = event.data
    try:
        ranks = {
            str(name): (_number(row[0]), _number(row[1])) for name, row in data["ranks"].items()
        }
        read_ns = int(data.get("read_ns", event.time_ns))
        if abs(event.time_ns - read_ns) > LONGEST_S * NS:
            return None
        return _Reading(
            node=int(data.get("node", 0)),
            time_ns=read_ns,
            generation=event.generation,
            cpus=max(1.0, _number(data["cpus"])),
            steal_s=None if data["steal_s"] is None else _number(data["steal_s"]),
            ranks=ranks,
        )
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError):
        return None


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(value)
    return number


def _names(pairs: Sequence[tuple[_Reading, _Reading]]) -> list[str]:
    return list(dict.fromkeys(name for a, _ in pairs for name in a.ranks))


def _grown(
    rows: Sequence[tuple[_Reading, _Reading, float | None, float | None]],
) -> tuple[float, float]:
    """Growth of a counter, and the seconds over which it is known, summed between readings that
    have it, with no reading left out between them.
    """
    grown, over, known, since_ns, end_ns = 0.0, 0.0, None, 0, -1
    for a, b, before, after in rows:
        if a.time_ns != end_ns or (known is None and before is not None):
            known, since_ns = before, 0
        since_ns, end_ns = since_ns + b.time_ns - a.time_ns, b.time_ns
        if after is not None and known is not None:
            grown, over = grown + after - known, over + since_ns / NS
            known, since_ns = after, 0
    return grown, over


def others_of(log: Log) -> float | None:
    """Processors that other programs used while the arm was played, where that is much of the
    machine, by the word of who measures it: the orchestrator. None: it was not.
    """
    for event in log.of(Kind.MACHINE_BUSY):
        others, cpus = event.data["others"], event.data["cpus"]
        known = all(type(value) in (int, float) for value in (others, cpus))
        if event.actor == ORCHESTRATOR and known and others >= WORTH_SAYING * cpus > 0:
            return float(others)
    return None
