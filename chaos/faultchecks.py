"""Whether one fault of a scenario can be what it says: kind, parameters, trigger, target, duration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from chaos.diagnostics import Loc, Problem, unknown
from chaos.explain import validate
from chaos.fault import Where
from chaos.scenario import CountTarget, FaultSpec, StepsDuration, TargetSpec, WorkloadSpec


def check_fault(
    raw: Any,
    loc: Loc,
    kinds: Mapping[str, type[BaseModel]],
    workload: WorkloadSpec | None,
    strategy: BaseModel | None,
) -> Iterator[Problem]:
    """Everything wrong with one fault (its plain values) beyond what its model says.

    None: not known, not checked.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
        return
    name = raw["kind"]
    if name not in kinds:
        yield Problem(loc=(*loc, "kind"), message=unknown("fault kind", name, kinds))
        return
    kind = kinds[name]
    params = raw.get("params", {})
    if isinstance(params, dict):
        yield from validate(kind, params, (*loc, "params"))[1]
    spec, _ = validate(FaultSpec, raw)
    if spec is not None:
        yield from _duration(spec, kind, loc)
        yield from _phase(spec, kind, loc, workload)
        yield from _target(spec, kind, loc, workload, strategy)


def _duration(spec: FaultSpec, kind: type[BaseModel], loc: Loc) -> Iterator[Problem]:
    lasting = getattr(kind, "lasting", False)
    if lasting and spec.duration is None:
        yield Problem(
            loc=(*loc, "kind"), message=f"{spec.kind} lasts, so it needs a duration: 2s or {{steps: 20}}"
        )
    if not (lasting or getattr(kind, "may_last", False)) and spec.duration is not None:
        message = f"{spec.kind} is over once done, so it takes no duration"
        yield Problem(loc=(*loc, "duration"), message=message, on_key=True)
    if not isinstance(spec.duration, StepsDuration | None) and spec.duration <= 0:
        yield Problem(loc=(*loc, "duration"), message="a duration must be longer than 0")


def _phase(
    spec: FaultSpec, kind: type[BaseModel], loc: Loc, workload: WorkloadSpec | None
) -> Iterator[Problem]:
    phases = getattr(kind, "phases", ())
    phase = spec.at.phase
    if phase not in (None, "any") and phases and phase not in phases:
        message = f"{spec.kind} cannot act in phase {phase!r}; it can in {', '.join(phases)}"
        yield Problem(loc=(*loc, "at", "phase"), message=message)
    steps = spec.at.steps or [spec.at.step or 0]
    every = workload.checkpoint.every if workload else 1
    if phase == "checkpoint" and any(step % every for step in steps):
        message = f"a checkpoint is saved each {every} steps, so phase checkpoint needs a multiple of {every}"
        yield Problem(loc=(*loc, "at", "phase"), message=message)


def _target(
    spec: FaultSpec,
    kind: type[BaseModel],
    loc: Loc,
    workload: WorkloadSpec | None,
    strategy: BaseModel | None,
) -> Iterator[Problem]:
    target, at = spec.target, (*loc, "target")
    where = getattr(kind, "where", None)
    if where == Where.CHECKPOINT:
        if target.checkpoint is None:
            yield Problem(loc=at, message=f"{spec.kind} acts on checkpoints: target {{checkpoint: latest}}")
        for name in ("role", "rank", "replica", "select"):
            if name in target.model_fields_set:
                message = f"{spec.kind} acts on checkpoints, so its target has no {name}"
                yield Problem(loc=(*at, name), message=message, on_key=True)
        return
    if target.checkpoint is not None:
        message = f"{spec.kind} does not act on checkpoints; target a rank, or a role"
        yield Problem(loc=(*at, "checkpoint"), message=message, on_key=True)
    yield from _names_one(target, at)
    if where == Where.RANK and target.role == "spare":
        yield Problem(
            loc=(*at, "role"), message=f"{spec.kind} acts inside a training rank, and a spare does not train"
        )
    spares = getattr(strategy, "spares_wanted", 0)
    if target.role == "spare" and strategy is not None and not spares:
        yield Problem(
            loc=(*at, "role"),
            message="the recovery strategy has no spares: target a worker, or use hot-spare",
        )
    if workload is not None:
        yield from _exists(target, at, workload.ranks, None if strategy is None else spares)


def _names_one(target: TargetSpec, at: Loc) -> Iterator[Problem]:
    if target.rank is not None and target.replica is not None:
        yield Problem(loc=(*at, "replica"), message="give a rank or a replica, not both", on_key=True)
    for name in ("rank", "replica"):
        if getattr(target, name) is None:
            continue
        if "select" in target.model_fields_set:
            yield Problem(
                loc=(*at, "select"),
                message=f"{name} names one target, so there is nothing to select",
                on_key=True,
            )
        if target.role == "spare":
            yield Problem(
                loc=(*at, name), message=f"a spare has no {name}; use role: spare with select", on_key=True
            )


def _exists(target: TargetSpec, at: Loc, ranks: int, spares: int | None) -> Iterator[Problem]:
    for name in ("rank", "replica"):
        value = getattr(target, name)
        if value is not None and value >= ranks:
            message = f"there is no {name} {value}: with {ranks} ranks they go from 0 to {ranks - 1}"
            yield Problem(loc=(*at, name), message=message)
    if isinstance(target.select, CountTarget) and spares is not None:
        there = {"worker": ranks, "spare": spares, "any": ranks + spares}[target.role]
        if target.select.count > there > 0:
            message = f"cannot select {target.select.count} of {there}"
            yield Problem(loc=(*at, "select", "count"), message=message)
