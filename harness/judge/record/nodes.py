"""Nodes of an arm, the faults that concerned them, and what is known of ranks whose last log lines
were lost with their node.

A killed process leaves its last lines in memory that its supervisor reads; a lost machine takes
them with it. The samples that its ranks took in the last step that the others committed are then
known indirectly: from the count of samples that all ranks reduced together, and from the sample
order, all of which except their part was seen to be taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS, History, StepRun
from trainchaos.harness.judge.results import NodeResult


def nodes_of(log: Log) -> list[NodeResult]:
    """One row per node, by number; empty if ranks are not grouped into nodes.

    If a launcher's nodes are only names, the log only says which processes it placed there; all of
    them are on the harness's host.
    """
    home, bounds = homes(log), log.clock_bounds_s
    joined = {event.data["node"]: event.data for event in log.of(Kind.NODE_JOINED)}
    if not joined and len(set(home.values())) < 2:
        return []
    started, own = log.first(Kind.RUN_STARTED), next(iter(log.by(ORCHESTRATOR)), None)
    zero, here = started.time_ns if started else 0, own.data.get("host", "") if own else ""
    lost: dict[int, list[str]] = defaultdict(list)
    for event in log.of(Kind.NODE_LOST):
        after_s = (event.time_ns - zero) / NS
        lost[event.data["node"]].append(f"after {after_s:.2f} s: {event.data['why']}")
    rows = []
    for node in sorted({*joined, *home.values()}):
        about = joined.get(node, {"host": here, "address": "", "devices": []})
        names = [name for name, its in home.items() if its == node]
        rows.append(
            NodeResult(
                node=node,
                host=str(about["host"]),
                address=str(about["address"]),
                devices=[str(device) for device in about["devices"]],
                processes=names,
                lost=lost[node],
                clock_bound_s=max((bounds.get(name, 0.0) for name in names), default=0.0),
            )
        )
    return rows


def homes(log: Log) -> dict[str, int]:
    """Process -> number of the node that it was started on, if known."""
    spawned = log.of(Kind.PROCESS_SPAWNED)
    return {e.data["process"]: e.data["node"] for e in spawned if e.data.get("node") is not None}


def nodes_hit(episode: Episode, home: Mapping[str, int]) -> list[int]:
    """Numbers of the nodes that a fault occurrence acted on, directly or through a process."""
    named = [episode.target[key] for key in ("node", "nodes") if key in episode.target]
    numbers = [
        n for one in named for n in (one if isinstance(one, list) else [one]) if isinstance(n, int)
    ]
    names = (*episode.processes, *([episode.process] if episode.process else []))
    return sorted({*numbers, *(home[name] for name in names if name in home)})


def hit_before(log: Log, episodes: Iterable[Episode], event: Event, node: int | None) -> bool:
    """Whether a fault had acted on a node before an event."""
    home = homes(log)
    return any(
        one.injected and one.injected.time_ns <= event.time_ns and node in nodes_hit(one, home)
        for one in episodes
    )


def silenced(log: Log) -> frozenset[str]:
    """Processes that ended with a lost node and whose logs have no orderly end."""
    return log.once("silenced", lambda log: _lost_with(log, log.of(Kind.NODE_LOST)))


def taken_away(log: Log, episodes: Sequence[Episode]) -> list[tuple[Event, frozenset[int]]]:
    """Nodes that were lost although no fault had hit them, and whose agents were seen to have
    ended: the loss, and the numbers of the failures that are the ends of its processes, or errors
    of their generation.

    A node that was given up for its silence alone is none of them: it may have been alive.
    """
    found = []
    for loss in log.of(Kind.NODE_LOST):
        if not loss.data.get("taken_away") or hit_before(log, episodes, loss, loss.data["node"]):
            continue
        names, failures = _lost_with(log, [loss]), list(log.of(Kind.FAILURE_DETECTED))
        ends = [e for e in failures if e.data["cause"] == "exit" and e.data["process"] in names]
        broken = {event.generation for event in ends}
        nameless = (e for e in failures if e.data["cause"] == "error" and not e.data["process"])
        errors = [event for event in nameless if event.generation in broken]
        found.append((loss, frozenset(e.data["failure"] for e in (*ends, *errors))))
    return found


def _lost_with(log: Log, losses: Iterable[Event]) -> frozenset[str]:
    lost = {(event.data["node"], event.time_ns) for event in losses}
    if not lost:
        return frozenset()
    ended = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_EXITED)}
    started = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_SPAWNED)}
    return frozenset(
        name
        for name, node in homes(log).items()
        if any(at == node and started[name] <= when <= ended.get(name, when) for at, when in lost)
        and not (name in log.actors and log.actors[name].ended)
    )


def witnessed(history: History, run: StepRun, due: Counter[int]) -> Counter[int]:
    """Samples of a step that silenced members took, inferred from the reduced count. ``due``: all
    samples of the step.

    Empty if every member's share was seen, if another member's share is missing too, or if the
    reduced count is not that of ``due``.
    """
    generation, taken = history.generation(run.generation), Counter(run.samples)
    missing = set(generation.members if generation else ()) - set(run.taken.actors)
    if not missing or taken - due or not run.done.all_say("samples", due.total()):
        return Counter()
    return due - taken if missing <= silenced(history.log) else Counter()
