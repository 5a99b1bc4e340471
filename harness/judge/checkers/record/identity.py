"""Whether the log is of this arm: its cell, strategy, seed, data and size, and the faults that the
seed draws.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, verdict_of
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER

_PARTS = {
    "target": ("ranks", "spares", "nodes", "links", "checkpoint", "each"),
    "at": ("points", "times_s", "event", "nth", "declined"),
}
"""Parts of a plan that the seed decides."""
SAVER = 0  # the rank whose next save is hit if the plan names no rank
_WHO = ("ranks", "spares", "nodes", "links")
_Facts = Mapping[str, Any]


def identity(evidence: Evidence) -> Finding:
    """The log describes itself as the resolved scenario describes the arm, on the data of the other
    arms, and the faults are those that the seed draws, at the drawn places and times.
    """
    expected = evidence.expected
    problems = [*_settings(evidence)]
    if expected.plan is not None:
        problems += _planned(evidence, expected.plan)
        problems += _injected(evidence, expected.plan)
    unknown_here = f"what this arm should be is not known here: {expected.problem}"
    info = evidence.history.info
    faults = f", {len(expected.plan)} faults as drawn" if expected.plan else ""
    return verdict_of(
        problems,
        f"{info.arm} of {info.cell}, repeat {info.repeat}, seed {info.seed}:"
        f" {info.strategy}{faults}",
        [unknown_here] if expected.problem else [],
    )


def _settings(evidence: Evidence) -> Iterator[str]:
    """What the run is said to be, and is planned otherwise; and data that is not the control's."""
    started = evidence.log.first(Kind.RUN_STARTED)
    said: Mapping[str, Any] = started.data if started else {}
    cell, expected = evidence.cell, evidence.expected
    spec = cell.scenario.workload
    due = {
        "arm": evidence.arm,
        "cell": cell.id,
        "repeat": expected.repeat,
        "seed": expected.seed,
        "strategy": cell.scenario.recovery.strategy,
        "ranks": spec.ranks,
        "spares": expected.spares,
        "steps": spec.steps,
        "global_batch": spec.global_batch,
        "launcher": cell.scenario.launcher.kind,
        "evaluate": spec.evaluate.due if spec.evaluate else {},
        "monitored": True,
    }
    if spec.command is None and expected.seed is not None:
        due["checkpoint_every"] = spec.checkpoint.every
        if said.get("order", {}).get("seed") != expected.seed:
            yield f"the log says that samples are ordered by {said.get('order')}"
    for name, value in due.items():
        if value is not None and said.get(name, value) != value:
            yield f"the log says {name} {said[name]}, the scenario {value}"
    control = evidence.control.first(Kind.RUN_STARTED) if evidence.control is not None else None
    for name in ("order", "data_digest"):
        if control is not None and said.get(name) != control.data.get(name):
            yield f"the log says {name} {said.get(name)}, the control arm {control.data.get(name)}"
    yield from _devices(evidence)


def _devices(evidence: Evidence) -> Iterator[str]:
    """Ranks that were started on another kind of device than the scenario asks for."""
    due = evidence.cell.scenario.workload.device
    if due == "auto":
        return
    for event in evidence.log.of(Kind.PROCESS_SPAWNED):
        device = event.data.get("device")
        if device and event.data["role"] != KEEPER and not str(device).startswith(due):
            yield f"{event.data['process']} was started on {device}, the scenario asks for {due}"


def _planned(evidence: Evidence, plan: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    announced = list(evidence.log.of(Kind.FAULT_PLANNED))
    for event in announced:
        name = event.data["fault"]
        if name not in plan:
            yield f"fault {name} is announced, and is not of this arm"
            continue
        if event.data["kind"] != plan[name]["kind"]:
            yield f"fault {name} is announced as {event.data['kind']}, and is {plan[name]['kind']}"
        for part, keys in _PARTS.items():
            said = event.data[part] or {}
            for key in keys:
                drawn = plan[name][part][key]
                if key in said and _plain(said[key]) != drawn:
                    yield (
                        f"{part}.{key} of {name} is {said[key]} in the log, and the seed draws"
                        f" {drawn}"
                    )
    missing = plan.keys() - {event.data["fault"] for event in announced}
    if evidence.history.runs:
        yield from (f"fault {name} was never announced" for name in sorted(missing))


def _injected(evidence: Evidence, plan: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    failures = list(evidence.log.of(Kind.FAULT_FAILED))
    failed_ones = {(e.data["fault"], e.data["occurrence"]) for e in failures}
    void = Counter(e.data["fault"] for e in failures if e.data.get("again"))
    fired: Counter[str] = Counter()
    for event in evidence.log.of(Kind.FAULT_INJECTED):
        name = event.data["fault"]
        fired[name] += 1
        if name not in plan:
            yield f"{name} was injected, and is not a fault of this arm"
        elif event.data["kind"] != plan[name]["kind"]:
            yield f"{name} was injected as {event.data['kind']}, and is {plan[name]['kind']}"
        else:
            missed = (name, event.data["occurrence"]) in failed_ones
            yield from aimed(evidence.history, event, plan[name], missed=missed)
    for name, most in (evidence.expected.most or {}).items():
        if fired[name] - void[name] > most:
            yield f"{name} was injected {fired[name]} times, {most} are planned"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def aimed(history: History, event: Event, planned: _Facts, *, missed: bool) -> Iterator[str]:
    """Deviations of an injection from the ranks, spares, nodes, links, checkpoint and steps of its
    plan. ``missed``: it failed, so it may have found no target.
    """
    name, target = event.data["fault"], event.data["target"] or {}
    yield from _when(history, event, planned)
    due = {key: [*planned["target"][key], *_of_each(planned, key)] for key in _WHO}
    yield from _rank(history, event, planned, due)
    nodes = target.get("nodes", [target["node"]] if target.get("node") is not None else [])
    yield from _others(name, "node", nodes, due["nodes"])
    yield from _others(name, "link", target.get("links", []), due["links"])
    if due["nodes"] and not nodes and not missed:
        yield f"{name} hit no node, planned is {_list(due['nodes'])}"
    saved = planned["target"]["checkpoint"]
    hit = target.get("checkpoint")
    if hit is not None and saved not in (None, "latest") and event.step != saved and not missed:
        yield f"{name} hit {hit}, planned is the checkpoint of step {saved}"


def _of_each(planned: _Facts, key: str) -> Iterator[Any]:
    return (one for targets in planned["target"]["each"] for one in targets[key])


def _list(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def _others(name: str, what: str, hit: Iterable[Any], due: list[Any]) -> Iterator[str]:
    yield from (
        f"{name} hit {what} {one}, planned is {_list(due)}" for one in hit if one not in due
    )


def _when(history: History, event: Event, planned: _Facts) -> Iterator[str]:
    points, target = planned["at"]["points"], event.data["target"] or {}
    saved = (
        target.get("checkpoint") is not None and not history.info.observed
    )  # the event's step is that of the checkpoint that was hit
    if not points or event.step is None or saved:
        return
    name, step = event.data["fault"], event.step - event.data.get("late_steps", 0)
    phase = event.data.get("phase")
    if step not in {point[0] for point in points}:
        yield (
            f"{name} was injected in step {event.step}, planned is"
            f" {_list(point[0] for point in points)}"
        )
    elif phase is not None and [step, phase] not in points:
        due = _list(point[1] for point in points if point[0] == step)
        yield f"{name} was injected in phase {phase} of step {event.step}, planned is {due}"


def _rank(
    history: History, event: Event, planned: _Facts, due: Mapping[str, list[Any]]
) -> Iterator[str]:
    """The rank is one of the plan's, and the process held that rank."""
    name, target = event.data["fault"], event.data["target"] or {}
    rank, process = target.get("rank"), target.get("process")
    if rank is None:
        if process is not None and not due["spares"]:
            yield f"{name} hit {process}, which held no rank, and is planned for no spare"
        return
    saver = [SAVER] if planned["target"]["checkpoint"] is not None else []
    ranks = due["ranks"] or (saver if process else [])
    if ranks and rank not in ranks:
        yield f"{name} hit rank {rank}, planned is {_list(ranks)}"
    generation = history.generation(event.generation)
    if process is not None and generation is not None:
        held = _held(history, generation, process)
        if rank not in held:
            yield f"{name} hit {process} as rank {rank}, which was rank {_list(held) or 'none'}"


def _held(history: History, generation: Generation, process: str) -> set[int]:
    """Ranks that a member may have had. A command's members are in the order of their ranks, with
    gaps for ranks that were lost or never found; each was found with its own rank.
    """
    if process not in generation.members:
        return set()
    place = {generation.members.index(process)}
    if not history.info.observed:
        return place
    found = {
        int(event.data["rank"])
        for event in history.log.of(Kind.PROCESS_SPAWNED)
        if event.data["process"] == process and event.data.get("rank") is not None
    }
    return place | found
