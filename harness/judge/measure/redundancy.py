"""When a job was as well protected from the next failure as before the last one."""

from __future__ import annotations

import math

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.record.history import NS, History


def time_to_redundancy(
    history: History, injected: Event | None, incident: Incident
) -> float | None:
    """Seconds from the fault until a generation of all ranks is ready and as many ready processes
    wait as spares were provisioned.

    A process waits if it is ready, not a member of the generation at that time, and neither gone
    nor blamed for a failure. None if nothing was lost, or if a process that would have restored
    redundancy was still starting when the arm ended; infinity if the job went on, or ended, with
    fewer processes and none starting. A command's spares cannot be seen, so only the generation
    counts there.
    """
    if injected is None or incident.recovery_time is None:
        return None
    if incident.never_recovered:
        return math.inf
    spares = 0 if history.info.observed else history.info.spares
    for time_ns in _moments(history, injected.time_ns):
        if _whole(history, time_ns) and _waiting(history, time_ns) >= spares:
            return (time_ns - injected.time_ns) / NS
    return None if history.cut_short or _starting(history) else math.inf


def _moments(history: History, since_ns: int) -> list[int]:
    """Times after the failure was answered at which redundancy may have been restored."""
    ready = [g.ready_ns or g.started_ns for g in history.worked if g.started_ns > since_ns]
    first = min(ready, default=None)
    if first is None:
        return []
    joined = (e.time_ns for e in history.log.of(Kind.PROCESS_READY) if e.time_ns >= first)
    return sorted({*ready, *joined})


def _whole(history: History, time_ns: int) -> bool:
    generation = history.generation_at(time_ns)
    return generation is not None and generation.world >= history.info.ranks


def _waiting(history: History, time_ns: int) -> int:
    generation = history.generation_at(time_ns)
    members = set(generation.members) if generation else set()
    there = {e.data["process"] for e in history.log.of(Kind.PROCESS_READY) if e.time_ns <= time_ns}
    lost = (Kind.PROCESS_EXITED, Kind.FAILURE_DETECTED)
    gone = {e.data["process"] for e in history.log.of(*lost) if e.time_ns <= time_ns}
    return len(there - gone - members)


def _starting(history: History) -> bool:
    """Whether a process was still starting when the arm ended."""
    kinds = (Kind.PROCESS_READY, Kind.FAILURE_DETECTED, Kind.PROCESS_EXITED)
    settled = {e.data["process"] for e in history.log.of(*kinds) if not e.data.get("expected")}
    return any(e.data["process"] not in settled for e in history.log.of(Kind.PROCESS_SPAWNED))
