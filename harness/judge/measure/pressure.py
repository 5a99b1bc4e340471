"""How short of processors an arm was while it trained, and how much that slowed it.

The harness reads two counters of the training threads of the arm's ranks: time running, and time in
a run queue. Ranks that share too few processors wait for each other on a quiet machine too. So only
a longer wait *per second of running*, relative to the steps of comparison, excuses anything. A job
that computes more than it should waits more in total but not per second; one that sleeps does not
wait at all. Neither is excused by a constant load.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from trainchaos.chaos.planning.load import WORTH_SAYING
from trainchaos.harness.judge.measure.partition import Ideal
from trainchaos.harness.judge.record.history import NS, History, StepRun

TOO_BUSY = "the machine was too busy: "
"""Prefix of a finding that a quieter machine would decide."""
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
STARVED = 2.0
"""Seconds in a queue per second of running, above which a rank had less than a third of the
processor time that it wanted: the wait of a step is then several times its work, and varies so.
"""
LIKE = 1.5
"""Largest ratio of a step to the median one at which it is similar. Waits in longer steps say
nothing about the median: a rank that got no processor for seconds made one step long, and no other.
"""
NO_STEP_S = 1e-9


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
class NetStepTime:
    """A step without its waits for processors, in seconds: most likely, and at least. ``may_pass``:
    the likely wait is within what a verdict may subtract; ``starved``: the ranks waited so long for
    processors that what is left varies much; ``why``: message.
    """

    likely_s: float
    least_s: float
    may_pass: bool
    starved: bool
    why: str


def pressures_of(
    log: Log, start_ns: int, end_ns: int, apart: Sequence[tuple[int, int]] = ()
) -> dict[int, Pressure]:
    """Pressure in an interval of an arm by node (0: also the harness's machine), without nodes that
    have too few readings. ``apart``: disjoint parts of the interval that do not count, as (from,
    until) in ns; pairs of readings mostly in them are left out.
    """
    by_node: dict[int, list[Event]] = defaultdict(list)
    for event in log.of(Kind.PRESSURE_READ):
        by_node[event.data.get("node", 0)].append(event)
    found = {
        node: _pressure(sorted(readings, key=_read_ns), start_ns, end_ns, apart)
        for node, readings in by_node.items()
    }
    return {node: pressure for node, pressure in found.items() if pressure is not None}


def _read_ns(reading: Event) -> int:
    return int(reading.data.get("read_ns", reading.time_ns))


def _pressure(
    readings: Sequence[Event], start_ns: int, end_ns: int, apart: Sequence[tuple[int, int]]
) -> Pressure | None:
    """Pressure from the readings of one node; None if they cover too little."""
    times = [_read_ns(reading) for reading in readings]
    first = max((n for n, at in enumerate(times) if at <= start_ns), default=0)
    last = min((n for n, at in enumerate(times) if at >= end_ns), default=len(readings) - 1)
    pairs = [
        (a, b)
        for a, b in itertools.pairwise(readings[first : last + 1])
        if a.generation == b.generation
        and a.data["ranks"]
        and a.data["ranks"].keys() == b.data["ranks"].keys()
        and 0 < _read_ns(b) - _read_ns(a) <= LONGEST_S * NS
        and 2 * _within(apart, _read_ns(a), _read_ns(b)) <= _read_ns(b) - _read_ns(a)
    ]
    seconds = _seconds(pairs)
    counted_s = (end_ns - start_ns - _within(apart, start_ns, end_ns)) / NS
    if seconds < max(LEAST_S, LEAST_SHARE * counted_s):
        return None
    ran: dict[str, float] = defaultdict(float)
    queued: dict[str, float] = defaultdict(float)
    for a, b in pairs:
        for name, (used_s, waited_s) in b.data["ranks"].items():
            ran[name] += used_s - a.data["ranks"][name][0]
            queued[name] += waited_s - a.data["ranks"][name][1]
    # A wait is counted when it ends, so part of it may lie before these readings.
    waits = (min(waited, max(0.0, seconds - ran[name])) for name, waited in queued.items())
    cpus = max(b.data["cpus"] for _, b in pairs)
    steal, over = _stolen(pairs)
    return Pressure(
        ran=sum(ran.values()) / seconds,
        queued=sum(waits) / seconds,
        cpus=cpus,
        steal=steal / over / cpus if over else 0.0,
    )


def _stolen(pairs: Sequence[tuple[Event, Event]]) -> tuple[float, float]:
    """Growth of the stolen time, and the seconds over which it is known: on a machine of many
    processors not every reading has it.
    """
    grown, over = 0.0, 0.0
    known: Event | None = None
    end: Event | None = None
    for a, b in pairs:
        if a is not end or known is None:
            known = a if a.data["steal_s"] is not None else None
        if known is not None and b.data["steal_s"] is not None:
            grown += b.data["steal_s"] - known.data["steal_s"]
            over += _seconds([(known, b)])
            known = b
        end = b
    return grown, over


def _seconds(pairs: Sequence[tuple[Event, Event]]) -> float:
    return sum(_read_ns(b) - _read_ns(a) for a, b in pairs) / NS


def _within(spans: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in spans)


def net_of_pressure(
    history: History, ideal: Ideal, step_s: float, tail: Sequence[StepRun]
) -> NetStepTime | None:
    """The steps ``tail``, which take ``step_s``, net of pressure. None if there are no readings:
    then nothing is subtracted.
    """
    ideals = _over(ideal.history, ideal.runs, ideal.step_s)
    nows = _over(history, tail, step_s)
    # a step takes as long as on the node that is worst off
    found = [
        (*_excuse(ideal.step_s, step_s, ideals[node], nows[node]), ideals[node], nows[node])
        for node in sorted(ideals.keys() & nows.keys())
    ]
    most_s, likely_s, before, now = max(found, key=lambda one: one[:2], default=(0, 0, None, None))
    if before is None or now is None or most_s <= 0:
        return None
    stolen = f", and {100 * now.steal:.0f} % of the processors were stolen" * (now.steal > 0.01)
    return NetStepTime(
        likely_s=max(NO_STEP_S, step_s - likely_s),
        least_s=max(NO_STEP_S, step_s - most_s),
        may_pass=likely_s <= LIMIT * step_s,
        starved=now.wait > STARVED,
        why=f"its ranks stood in a run queue for {now.wait:.1f} s for each second that they ran,"
        f" and not for {before.wait:.1f} s{stolen}, which is {100 * likely_s / step_s:.0f} % of a"
        " step",
    )


def _excuse(ideal_s: float, step_s: float, ideal: Pressure, now: Pressure) -> tuple[float, float]:
    """How much longer a step of ``step_s`` waited for a processor than one of ``ideal_s`` under
    other pressure, in seconds: at most, and most likely.

    In the ideal step all ranks together run for ``ideal.ran * ideal_s``. Each second of that waits
    longer by the difference of the two ``wait``, and as many ranks wait at a time as want a
    processor at a time.
    """
    waited = ideal.ran * ideal_s * max(0.0, now.wait - ideal.wait)
    fewer, more = sorted((ideal.wanting, now.wanting))
    stolen = max(0.0, now.steal - ideal.steal) * step_s
    unsteady = UNSTEADY * ideal.ran * ideal_s * now.wait / ideal.wanting
    most_s = MARGIN * (waited / fewer + stolen * now.cpus) + unsteady
    return min(step_s, most_s), min(step_s, waited / more + stolen)


def _over(history: History, runs: Sequence[StepRun], median_s: float) -> dict[int, Pressure]:
    """Pressure over the steps similar to the median one; over all steps if too little was read in
    those.
    """
    like = [run for run in runs if run.seconds <= LIKE * median_s] or runs
    start_ns, end_ns = min(run.start_ns for run in like), max(run.end_ns for run in like)
    others = [(run.start_ns, run.end_ns) for run in runs if run.seconds > LIKE * median_s]
    found = pressures_of(history.log, start_ns, end_ns, others)
    return found or pressures_of(history.log, start_ns, end_ns)


def others_of(log: Log) -> float | None:
    """Processors that other programs used while the arm was played, where that is much of the
    machine, by the word of who measures it: the orchestrator. None: it was not.
    """
    for event in log.of(Kind.MACHINE_BUSY):
        others, cpus = event.data["others"], event.data["cpus"]
        if event.actor == ORCHESTRATOR and others >= WORTH_SAYING * cpus > 0:
            return float(others)
    return None
