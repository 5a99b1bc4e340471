"""The key to an exam: what really happened in each run, from its fault events and the truth of each
kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log
from trainchaos.harness.attribute.truth import Truth, truth_of
from trainchaos.harness.explain.diagnosis import CauseClass, Layer
from trainchaos.recovery.playbook.entry import Action


class KeyIncident(BaseModel):
    """One injected fault. ``at_s``: of its first hit, since the run began; ``ranks``, ``nodes``:
    those that may be named; ``nobody``: naming nobody is right; ``anybody``: whoever is named is
    right; ``hit``: ranks that were hit, so that naming them is no false blame; ``trace``: see
    ``truth.Trace``. The first of ``causes`` is the most exact.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fault: str
    kind: str
    at_s: float
    step: int | None
    phase: str | None
    causes: tuple[CauseClass, ...]
    layers: tuple[Layer, ...]
    actions: tuple[Action, ...]
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    nobody: bool = False
    anybody: bool = False
    hit: tuple[int, ...] = ()
    hit_nodes: tuple[int, ...] = ()
    trace: str = "events"
    why: str = ""


def key_of(log: Log, faults: Mapping[str, Mapping[str, Any]]) -> list[KeyIncident]:
    """The incidents of an arm, one for each fault that was injected. ``faults``: id -> the fault
    as in the scenario. Raises NoTruth.
    """
    started = log.first(Kind.RUN_STARTED)
    strategy = str(started.data["strategy"]) if started else ""
    start_ns = started.time_ns if started else 0
    first: dict[str, Event] = {}
    hits: dict[str, list[Event]] = {}
    for event in log.of(Kind.FAULT_INJECTED):
        first.setdefault(event.data["fault"], event)
        hits.setdefault(event.data["fault"], []).append(event)
    planned = {event.data["fault"]: event for event in log.of(Kind.FAULT_PLANNED)}
    found = []
    for name, event in first.items():
        fault = faults[name]
        at = {**fault["at"], "phase": event.data.get("phase")}
        truth = truth_of(str(fault["kind"]), fault.get("params", {}), at, strategy)
        act = [one for one in hits[name] if one.data.get("act") == event.data.get("act")]
        ranks, nodes, members = _hit(log, act, planned.get(name))
        found.append(
            _incident(truth, event, (event.time_ns - start_ns) / 1e9, ranks, nodes, members)
        )
    return found


def _incident(
    truth: Truth,
    event: Event,
    at_s: float,
    ranks: set[int],
    nodes: set[int],
    members: set[int],
) -> KeyIncident:
    named = ranks if "rank" in truth.places else set()
    named = named | members if "member" in truth.places else named
    return KeyIncident(
        fault=event.data["fault"],
        kind=event.data["kind"],
        at_s=round(at_s, 6),
        step=event.step,
        phase=event.data.get("phase"),
        causes=truth.causes,
        layers=truth.layers,
        actions=truth.actions,
        ranks=tuple(sorted(named)),
        nodes=tuple(sorted(nodes)) if "node" in truth.places else (),
        nobody="none" in truth.places,
        anybody="any" in truth.places,
        hit=tuple(sorted(ranks | members)),
        hit_nodes=tuple(sorted(nodes)),
        trace=truth.trace,
        why=truth.why,
    )


def _hit(log: Log, act: list[Event], planned: Event | None) -> tuple[set[int], set[int], set[int]]:
    """Ranks hit, nodes hit, and ranks of processes that were hit with a node."""
    ranks: set[int] = set()
    nodes: set[int] = set()
    processes: set[str] = set()
    for event in act:
        target = event.data["target"]
        if type(target.get("rank")) is int:
            ranks.add(target["rank"])
        if type(target.get("node")) is int:
            nodes.add(target["node"])
        nodes |= set(target.get("nodes") or ())
        if isinstance(target.get("processes"), list):
            processes |= set(target["processes"])
    if planned is not None and not ranks:
        chosen = planned.data["target"]
        ranks |= {rank for rank in chosen.get("ranks") or () if type(rank) is int}
        nodes |= {node for node in chosen.get("nodes") or () if type(node) is int}
    members = _members(log, act[0].time_ns)
    on = {e.data["process"]: e.data.get("node") for e in log.of(Kind.PROCESS_SPAWNED)}
    there = {
        rank
        for rank, name in enumerate(members)
        if name in processes or (nodes and on.get(name) in nodes)
    }
    return ranks, nodes, there


def _members(log: Log, time_ns: int) -> list[str]:
    started = [e for e in log.of(Kind.GENERATION_STARTED) if e.time_ns <= time_ns]
    return list(started[-1].data["members"]) if started else []
