"""Nodes of an arm and the faults that concerned them, from the log alone."""

from __future__ import annotations

from collections.abc import Mapping

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS
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
    return [
        NodeResult(
            node=node,
            host=str(joined[node]["host"] if node in joined else _own_host(log)),
            address=str(joined[node]["address"]) if node in joined else "",
            devices=[str(device) for device in joined[node]["devices"]] if node in joined else [],
            processes=[name for name, its in home.items() if its == node],
            lost=_lost(log, node),
            clock_bound_s=max(
                (s for name, s in bounds.items() if home.get(name) == node), default=0.0
            ),
        )
        for node in sorted({*joined, *home.values()})
    ]


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


def _own_host(log: Log) -> str:
    own = log.actors[ORCHESTRATOR].events if ORCHESTRATOR in log.actors else ()
    return next((str(event.data["host"]) for event in own if event.kind is Kind.ACTOR_STARTED), "")


def _lost(log: Log, node: int) -> list[str]:
    """When and why the node was lost, each time."""
    started = log.first(Kind.RUN_STARTED)
    zero = started.time_ns if started else 0

    def when(event: Event) -> float:
        return (event.time_ns - zero) / NS

    losses = (event for event in log.of(Kind.NODE_LOST) if event.data["node"] == node)
    return [f"after {when(event):.2f} s: {event.data['why']}" for event in losses]
