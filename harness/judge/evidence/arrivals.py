"""How many of the arrivals of a fault (``mtbf``, ``weibull``, a trace of times) were due in an arm,
and how many of these fired.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.fault import FaultSpec, TraceSpec
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.results import Arrivals


def arrivals_of(
    history: History, episodes: Sequence[Episode], faults: Sequence[FaultSpec]
) -> dict[str, Arrivals]:
    """Fault -> its arrivals. Due: planned until the arm ended, or until its last step where the job
    completed, as nothing is injected after that. Fired: each act once, whatever it hit.
    """
    ended = history.end_ns
    if history.outcome == "completed":
        ended = max((run.end_ns for run in history.runs), default=ended)
    planned = {e.data["fault"]: e.data["at"] or {} for e in history.log.of(Kind.FAULT_PLANNED)}
    found = {}
    for fault in faults:
        times = planned.get(fault.id, {}).get("times_s") or []
        if not arrives(fault) or not times:
            continue
        due = sum(history.began_ns + time_s * NS <= ended for time_s in times)
        acts = {
            one.injected.data.get("act", one.occurrence)
            for one in episodes
            if one.fault == fault.id and one.injected is not None
        }
        # one may be done again, where it is triggered anew
        fired = min(len(acts), len(times))
        found[fault.id] = Arrivals(fired=fired, due=max(due, fired))
    return found


def arrives(fault: FaultSpec) -> bool:
    """Whether it comes at times that are drawn or traced."""
    at = fault.at
    return (
        at.mtbf is not None
        or at.weibull is not None
        or (isinstance(at.trace, TraceSpec) and bool(at.trace.times))
    )
