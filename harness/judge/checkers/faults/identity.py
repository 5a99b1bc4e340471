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
_Facts = Mapping[str, Any]


def identity(evidence: Evidence) -> Finding:
    """The log describes itself as the resolved scenario describes the arm, on the data of the other
    arms, and the faults are those that the seed draws, at the drawn places and times.
    """
    expected, info = evidence.expected, evidence.history.info
    problems = [*_settings(evidence)]
    if expected.plan is not None:
        problems += _planned(evidence, expected.plan)
        problems += _injected(evidence, expected.plan)
    unknown_here = f"what this arm should be is not known here: {expected.problem}"
    faults = f", {len(expected.plan)} faults as drawn" if expected.plan else ""
    return verdict_of(
        problems,
        f"{info.arm} of {info.cell}, repeat {info.repeat}, seed {info.seed}:"
        f" {info.strategy}{faults}",
        [unknown_here] if expected.problem else [],
    )


def _settings(evidence: Evidence) -> Iterator[str]:
    """What the run is said to be, and is planned otherwise; data that is not the control's; ranks
    on another kind of device than the scenario asks for.
    """
    started = evidence.log.first(Kind.RUN_STARTED)
    said: _Facts = started.data if started else {}
    cell, expected, spec = evidence.cell, evidence.expected, evidence.cell.scenario.workload
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
    for event in evidence.log.of(Kind.PROCESS_SPAWNED) if spec.device != "auto" else ():
        name, device = event.data["process"], event.data.get("device")
        if device and event.data["role"] != KEEPER and not str(device).startswith(spec.device):
            yield f"{name} was started on {device}, the scenario asks for {spec.device}"


def _planned(evidence: Evidence, plan: Mapping[str, _Facts]) -> Iterator[str]:
    announced = {event.data["fault"]: event.data for event in evidence.log.of(Kind.FAULT_PLANNED)}
    for name, said in announced.items():
        if name not in plan:
            yield f"fault {name} is announced, and is not of this arm"
            continue
        if said["kind"] != plan[name]["kind"]:
            yield f"fault {name} is announced as {said['kind']}, and is {plan[name]['kind']}"
        for part, keys in _PARTS.items():
            for key in keys:
                told, drawn = (said[part] or {}).get(key), plan[name][part][key]
                if key in (said[part] or {}) and json.loads(json.dumps(told)) != drawn:
                    yield f"{part}.{key} of {name} is {told} in the log, and the seed draws {drawn}"
    if evidence.history.runs:
        missing = sorted(plan.keys() - announced.keys())
        yield from (f"fault {name} was never announced" for name in missing)


def _injected(evidence: Evidence, plan: Mapping[str, _Facts]) -> Iterator[str]:
    failures = {_key(event): event for event in evidence.log.of(Kind.FAULT_FAILED)}
    fired: Counter[str] = Counter()
    for event in evidence.log.of(Kind.FAULT_INJECTED):
        name, failure = event.data["fault"], failures.get(_key(event))
        fired[name] += failure is None or not failure.data.get("again")
        if name not in plan:
            yield f"{name} was injected, and is not a fault of this arm"
        elif event.data["kind"] != plan[name]["kind"]:
            yield f"{name} was injected as {event.data['kind']}, and is {plan[name]['kind']}"
        else:
            yield from _aimed(evidence.history, event, plan[name], missed=failure is not None)
    for name, most in (evidence.expected.most or {}).items():
        if fired[name] > most:
            yield f"{name} was injected {fired[name]} times, {most} are planned"


def _aimed(history: History, event: Event, planned: _Facts, *, missed: bool) -> Iterator[str]:
    """Deviations of an injection from the ranks, spares, nodes, links, checkpoint and steps of its
    plan. ``missed``: it failed, so it may have found no target.
    """
    name, target, aim = event.data["fault"], event.data["target"] or {}, planned["target"]
    rank, process, saved = target.get("rank"), target.get("process"), aim["checkpoint"]
    ranks, nodes, links, spares = (
        [*aim[key], *(one for targets in aim["each"] for one in targets[key])]
        for key in ("ranks", "nodes", "links", "spares")
    )
    if not ranks and saved is not None and process:
        ranks = [SAVER]
    hit_nodes = target.get("nodes", [target["node"]] if target.get("node") is not None else [])
    yield from _when(history, event, planned)
    for what, hit, due in (
        ("rank", [rank] if rank is not None and ranks else [], ranks),
        ("node", hit_nodes, nodes),
        ("link", target.get("links", []), links),
    ):
        strange = (one for one in hit if one not in due)
        yield from (f"{name} hit {what} {one}, planned is {_list(due)}" for one in strange)
    if rank is None and process is not None and not spares:
        yield f"{name} hit {process}, which held no rank, and is planned for no spare"
    generation = history.generation(event.generation)
    if rank is not None and process is not None and generation is not None:
        held = _held(history, generation, process)
        if rank not in held:
            yield f"{name} hit {process} as rank {rank}, which was rank {_list(held) or 'none'}"
    if nodes and not hit_nodes and not missed:
        yield f"{name} hit no node, planned is {_list(nodes)}"
    hit = target.get("checkpoint")
    if hit is not None and saved not in (None, "latest", event.step) and not missed:
        yield f"{name} hit {hit}, planned is the checkpoint of step {saved}"


def _key(event: Event) -> tuple[str, int]:
    return event.data["fault"], event.data["occurrence"]


def _list(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def _when(history: History, event: Event, planned: _Facts) -> Iterator[str]:
    points, target = planned["at"]["points"], event.data["target"] or {}
    saved = target.get("checkpoint") is not None and not history.info.observed
    if not points or event.step is None or saved:  # then its step is that of the checkpoint
        return
    name, step = event.data["fault"], event.step - event.data.get("late_steps", 0)
    phase, phases = event.data.get("phase"), [point[1] for point in points if point[0] == step]
    if not phases:
        due = _list(point[0] for point in points)
        yield f"{name} was injected in step {event.step}, planned is {due}"
    elif phase is not None and phase not in phases:
        due = _list(phases)
        yield f"{name} was injected in phase {phase} of step {event.step}, planned is {due}"


def _held(history: History, generation: Generation, process: str) -> set[int]:
    """Ranks that a member may have had. A command's members are in the order of their ranks, with
    gaps for ranks that were lost or never found; each was found with its own rank.
    """
    if process not in generation.members:
        return set()
    place = {generation.members.index(process)}
    return place | {
        int(event.data["rank"])
        for event in (history.log.of(Kind.PROCESS_SPAWNED) if history.info.observed else ())
        if event.data["process"] == process and event.data.get("rank") is not None
    }
