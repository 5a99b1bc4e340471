"""Evidence shared by link faults: how their effect shows in a job's log. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Landed, Occurrence
from trainchaos.chaos.fault.witness import commits_timed


def probed(occurrence: Occurrence, events: Sequence[Event]) -> Mapping[str, Any] | None:
    """Measurements of an independent client on the link under the fault: ``measured_round_trip_s``
    and ``measured_mbit_per_s`` (None where nothing came through), and ``by``, what shapes the link.
    None: not measured yet.
    """
    for event in events:
        mine = event.kind is Kind.FAULT_EFFECT and event.data["fault"] == occurrence.fault
        seen = (
            event.data["evidence"] if mine and event.data["occurrence"] == occurrence.number else {}
        )
        if "round_trip_s" in seen:
            return {
                "measured_round_trip_s": seen["round_trip_s"],
                "measured_mbit_per_s": seen["mbit_per_s"],
                "by": seen.get("by", ""),
            }
    return None


def collectives_s(
    occurrence: Occurrence, events: Sequence[Event]
) -> tuple[list[float], list[float]]:
    """Collective times of the target in seconds, for steps before and after the injection."""
    commits = commits_timed(events, occurrence.process, "collective")
    before = [e.data["seconds"]["collective"] for e in commits if e.time_ns < occurrence.time_ns]
    since = [e.data["seconds"]["collective"] for e in commits if e.time_ns > occurrence.time_ns]
    return before, since


def stood_still(occurrence: Occurrence, events: Sequence[Event], least_s: float) -> Landed | None:
    """Evidence that the job's collectives stood still for ``least_s`` seconds, or that the job gave
    up the process group. None also until a probe of the link has reported.
    """
    measured = probed(occurrence, events)
    if measured is None:
        return None
    for event in events:
        found = event.kind is Kind.FAILURE_DETECTED and event.time_ns > occurrence.time_ns
        if found and event.data["cause"] in ("hang", "error"):
            evidence = {"detail": event.data["detail"], **measured}
            return Landed(witness="job: a stuck collective", evidence=evidence)
    before, since = collectives_s(occurrence, events)
    slowest_s = max(since, default=0.0)
    if not before or slowest_s - median(before) < least_s:
        return None
    evidence = {"slowest_collective_s": round(slowest_s, 3), **measured}
    return Landed(witness="job: timing of collectives", evidence=evidence)
