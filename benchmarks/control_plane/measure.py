"""From what the processes of a case noted to its results: figures with n, p50, p99 and maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.control_plane.cases import Case
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, read_actor

HEARTBEAT_MS, DECISION_MS = 50.0, 200.0
"""The goals at 2,048 agents: p99 of a heartbeat, and from a failure to the decision."""


@dataclass(frozen=True, kw_only=True)
class ProcessSample:
    """A process at a monotonic time: seconds of processor time so far, and resident bytes."""

    at_s: float
    cpu_s: float
    rss: int


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed (nearest rank). NaN of none.

    Raises ValueError for a share outside of (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share}")
    if not values:
        return math.nan
    return sorted(values)[math.ceil(share * len(values)) - 1]


def summary(values: Sequence[float]) -> dict[str, float | int] | None:
    """n, p50, p99 and maximum; None of no value."""
    if not values:
        return None
    return {
        "n": len(values),
        "p50": round(quantile(values, 0.5), 3),
        "p99": round(quantile(values, 0.99), 3),
        "max": round(max(values), 3),
    }


def between(samples: Iterable[Sequence[float]], begin_s: float, end_s: float) -> list[float]:
    """The values of (time, value) pairs within a time."""
    return [value for at_s, value in samples if begin_s <= at_s <= end_s]


def at(samples: Sequence[ProcessSample], when_s: float) -> ProcessSample | None:
    """The last sample not after a time, or else the first one; None of none."""
    before = [sample for sample in samples if sample.at_s <= when_s]
    return before[-1] if before else next(iter(samples), None)


def false_deaths(events: Iterable[Event], struck: frozenset[int]) -> dict[str, list[str]]:
    """Nodes that were given up, and processes that were declared to have failed, although nobody
    touched them.
    """
    where: dict[str, int] = {}
    nodes, processes = [], []
    for event in events:
        data = event.data
        match event.kind:
            case Kind.PROCESS_SPAWNED:
                where[data["process"]] = data["node"]
            case Kind.NODE_LOST if data["node"] not in struck:
                nodes.append(f"node {data['node']}: {data['why']}")
            case Kind.FAILURE_DETECTED if data["process"] is not None:
                if where.get(data["process"]) not in struck:
                    processes.append(f"{data['process']}: {data['cause']}: {data['detail']}")
    return {"nodes": nodes, "processes": processes}


def results(
    case: Case,
    found: Mapping[str, Any],
    *,
    events: Path,
    coordinator: Sequence[ProcessSample],
    agents: Sequence[ProcessSample],
    wall_s: float,
) -> dict[str, Any]:
    """The results of a case. ``found``: by its Locust process; ``events``: directory with the
    coordinator's log; ``coordinator``, ``agents``: samples of the two processes.
    """
    marks, samples = found["marks"], found["samples"]
    begin_s, end_s = marks.get("steady", math.inf), marks["end"]
    log = read_actor(events / f"{ORCHESTRATOR}.jsonl").events
    false = false_deaths(log, case.struck())
    latencies = {
        kind: summary([value for _, value in pairs])
        for kind, pairs in samples.items()
        if kind not in ("heartbeat", "beat")
    }
    for kind in ("heartbeat", "beat"):
        latencies[kind] = summary(between(samples.get(kind, ()), begin_s, end_s))
    return {
        "case": case.name,
        "agents": case.agents,
        "ranks": case.agents * case.ranks,
        "problem": found["problem"],
        "wall_s": round(wall_s, 1),
        "start": _start(marks),
        "latency_ms": latencies,
        "false_deaths": len(false["nodes"]) + len(false["processes"]),
        "false": {key: said[:10] for key, said in false.items()},
        "traffic": _traffic(found, begin_s),
        "coordinator": _cost(coordinator, case, marks),
        "agents_process": _cost(agents, case, marks),
        "dial_failures": found["dial_failures"],
        "fenced": found["fenced"],
        "facts": found["facts"],
    }


def _start(marks: Mapping[str, float]) -> dict[str, float]:
    """Seconds until all agents were admitted, and until the job trained, where it came so far."""
    return {
        name: round(marks[name] - marks["begun"], 3)
        for name in ("admitted", "trains")
        if name in marks
    }


def _traffic(found: Mapping[str, Any], begin_s: float) -> dict[str, float] | None:
    """Messages and bytes a second, of all agents together, while measured."""
    first, last = found["counted"].get("steady"), found["counted"]["end"]
    if first is None:
        return None
    spent_s = found["marks"]["end"] - begin_s
    return {f"{key}_per_s": round((last[key] - first[key]) / spent_s, 1) for key in last}


def _cost(
    samples: Sequence[ProcessSample], case: Case, marks: Mapping[str, float]
) -> dict[str, float] | None:
    """Processor time and memory: cores while measured, bytes for each agent."""
    if not samples or "steady" not in marks:
        return None
    base, begin = samples[0], at(samples, marks["steady"])
    end, last = at(samples, marks["act"]), samples[-1]
    assert begin is not None and end is not None
    spent_s = end.at_s - begin.at_s
    cost = {
        "rss_mb": round(last.rss / 1e6, 1),
        "rss_before_mb": round(base.rss / 1e6, 1),
        "rss_per_agent_kb": round((begin.rss - base.rss) / 1e3 / case.agents, 1),
        "cpu_s": round(last.cpu_s, 2),
    }
    if spent_s > 0:
        cost["cores_steady"] = round((end.cpu_s - begin.cpu_s) / spent_s, 3)
    return cost
