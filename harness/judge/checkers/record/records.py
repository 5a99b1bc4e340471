"""Whether the record is complete, and nothing was left behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainchaos.chaos.events.log import Kind, Log
from trainchaos.harness.judge.evidence.evidence import Evidence, passed, unknown, verdict_of
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.results import Finding


def no_orphans(evidence: Evidence) -> Finding:
    """The harness left nothing: no process, port or shared memory; every process was seen to exit,
    and every fault was healed.
    """
    left = evidence.log.first(Kind.LEFTOVERS)
    if left is None:
        return unknown("leftovers were not looked for: the harness died before it could")
    problems = [f"{what} left: {found}" for what, found in left_in(evidence.log)]
    exited = evidence.history.exited_ns
    spawned = [event.data["process"] for event in evidence.log.of(Kind.PROCESS_SPAWNED)]
    problems += [f"{name} was never seen to exit" for name in spawned if name not in exited]
    problems += [
        f"{episode.fault} (occurrence {episode.occurrence}) was not healed"
        for episode in unhealed(evidence.measures.episodes)
    ]
    return verdict_of(problems, f"{len(spawned)} processes, all gone")


def left_in(log: Log) -> list[tuple[str, Any]]:
    """What the harness left: processes, ports and shared memory, where it left any."""
    left = log.first(Kind.LEFTOVERS)
    kinds = ("processes", "ports", "shared_memory") if left is not None else ()
    return [(what, left.data[what]) for what in kinds if left is not None and left.data[what]]


def unhealed(episodes: Iterable[Episode]) -> list[Episode]:
    """Faults that acted and were never undone."""
    return [one for one in episodes if one.injected and not one.failed and one.healed is None]


def evidence_complete(evidence: Evidence) -> Finding:
    """Every record is whole (``record/whole.py``), and the orchestrator's has its start and end."""
    if evidence.log.first(Kind.RUN_FINISHED) is None:
        return unknown("no run_finished: the harness did not get to the end")
    return passed(f"{len(evidence.log.events)} events of {len(evidence.log.actors)} actors")
