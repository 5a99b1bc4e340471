"""What is known of ranks whose last log lines were lost with their node.

A killed process leaves its last lines in memory that its supervisor reads; a lost machine takes
them with it. The samples that its ranks took in the last step that the others committed are then
known indirectly: from the count of samples that all ranks reduced together, and from the sample
order, all of which except their part was seen to be taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import History, StepRun
from trainchaos.harness.judge.record.node_attribution import homes, nodes_hit


def silenced(log: Log) -> frozenset[str]:
    """Processes that ended with a lost node and whose logs have no orderly end."""
    return log.once("silenced", lambda log: _lost_with(log, log.of(Kind.NODE_LOST)))


def taken_away(log: Log, episodes: Iterable[Episode]) -> list[tuple[Event, frozenset[int]]]:
    """Nodes that were lost although no fault had hit them, and whose agents were seen to have
    ended: the loss, and the numbers of the failures that are the ends of its processes, or errors
    of their generation.

    A node that was given up for its silence alone is none of them: it may have been alive.
    """
    hit = [
        (episode.injected.time_ns, nodes_hit(episode, homes(log)))
        for episode in episodes
        if episode.injected
    ]
    found = []
    for loss in log.of(Kind.NODE_LOST):
        node = loss.data["node"]
        if not loss.data.get("taken_away") or any(
            at_ns <= loss.time_ns and node in nodes for at_ns, nodes in hit
        ):
            continue
        names, failures = _lost_with(log, [loss]), list(log.of(Kind.FAILURE_DETECTED))
        ends = [e for e in failures if e.data["cause"] == "exit" and e.data["process"] in names]
        broken = {event.generation for event in ends}
        errors = [
            e
            for e in failures
            if e.data["cause"] == "error" and e.data["process"] is None and e.generation in broken
        ]
        found.append((loss, frozenset(e.data["failure"] for e in (*ends, *errors))))
    return found


def _lost_with(log: Log, losses: Iterable[Event]) -> frozenset[str]:
    lost = {(event.data["node"], event.time_ns) for event in losses}
    if not lost:
        return frozenset()
    home = homes(log)
    ended = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_EXITED)}
    started = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_SPAWNED)}
    return frozenset(
        name
        for name, node in home.items()
        if any(at == node and started[name] <= when <= ended.get(name, when) for at, when in lost)
        and not (name in log.actors and log.actors[name].ended)
    )


def witnessed(history: History, run: StepRun, due: Counter[int]) -> Counter[int]:
    """Samples of a step that silenced members took, inferred from the reduced count. ``due``: all
    samples of the step.

    Empty if every member's share was seen, if another member's share is missing too, or if the
    reduced count is not that of ``due``.
    """
    generation = history.generation(run.generation)
    takers = {event.actor for event in run.batches}
    missing = set(generation.members) - takers if generation else set()
    taken = Counter(run.samples)
    if (
        not missing
        or taken - due
        or any(event.data["samples"] != due.total() for event in run.commits)
    ):
        return Counter()
    return due - taken if missing <= silenced(history.log) else Counter()
