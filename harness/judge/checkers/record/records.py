"""Whether the record is complete, and nothing was left behind."""

from __future__ import annotations

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, passed, unknown, verdict_of
from trainchaos.harness.judge.results import Finding


def no_orphans(evidence: Evidence) -> Finding:
    """The harness left nothing: no process, port or shared memory; every process was seen to exit,
    and every fault was healed.
    """
    left = evidence.log.first(Kind.LEFTOVERS)
    if left is None:
        return unknown("leftovers were not looked for: the harness died before it could")
    problems = [
        f"{what} left: {left.data[what]}"
        for what in ("processes", "ports", "shared_memory")
        if left.data[what]
    ]
    exited = {event.data["process"] for event in evidence.log.of(Kind.PROCESS_EXITED)}
    spawned = [event.data["process"] for event in evidence.log.of(Kind.PROCESS_SPAWNED)]
    problems += [f"{name} was never seen to exit" for name in spawned if name not in exited]
    for episode in evidence.measures.episodes:
        if episode.injected and not episode.failed and episode.healed is None:
            problems.append(f"{episode.fault} (occurrence {episode.occurrence}) was not healed")
    return verdict_of(problems, f"{len(spawned)} processes, all gone")


def evidence_complete(evidence: Evidence) -> Finding:
    """Every record is whole (``record/whole.py``), and the orchestrator's has its start and end."""
    if evidence.log.first(Kind.RUN_FINISHED) is None:
        return unknown("no run_finished: the harness did not get to the end")
    return passed(f"{len(evidence.log.events)} events of {len(evidence.log.actors)} actors")
