"""What each arm's log must contain according to the resolved scenario: identity, provisioned
processes, faults.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.plugins import FAULTS, STRATEGIES, load
from trainchaos.chaos.scenario.model import Cell, FaultSpec, ResolvedRun, TargetSpec
from trainchaos.chaos.schedule.plan import PlannedFault, plan_scenario, repeat_seed
from trainchaos.chaos.schedule.trigger import triggers
from trainchaos.harness.inject.occurrence import announcement
from trainchaos.harness.judge.evidence.absent import absent_plugin
from trainchaos.recovery.policy.strategy import Strategy

Facts = Mapping[str, Any]
_DONE = (Kind.STEP_COMMITTED, Kind.STEP_REPORTED)
_RESULTS = (Kind.STEP_COMMITTED, Kind.STATE_DIGEST, Kind.BATCH_TAKEN)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expectations for one arm. ``repeat``, ``seed``: its identity, None if only its cell is known;
    ``spares``: the strategy's number; ``plan``: fault -> announcement due in the log, as made by
    ``harness.inject.occurrence.announcement``; ``most``: fault -> largest allowed number of
    injections; ``or_else``: fault that hits a whole replica in ``plan`` -> its announcement if it
    hits one rank of it; ``twins``: other arms whose log has the same content; ``problem``: why a
    part of this could not be derived.
    """

    repeat: int | None = None
    seed: int | None = None
    spares: int | None = None
    plan: Mapping[str, Facts] | None = None
    most: Mapping[str, int] | None = None
    or_else: Mapping[str, Facts] = field(default_factory=dict)
    twins: tuple[str, ...] = ()
    problem: str = ""


def expected_of(resolved: ResolvedRun, cell: Cell, repeat: int, arm: str) -> Expected:
    """Derive what an arm must be from the scenario in the run directory; its plan is drawn again
    from its seed.
    """
    seed = repeat_seed(resolved.seed, repeat)
    scenario, spares = cell.scenario, 0
    if missing := absent_plugin(resolved, scenario):
        return Expected(repeat=repeat, seed=seed, problem=missing)
    try:
        if scenario.workload.command is None:
            strategies = load(STRATEGIES, Strategy)
            spares = strategies[scenario.recovery.strategy](
                **scenario.recovery.params
            ).spares_wanted
        planned = _plan(cell, seed, spares, select="all") if arm == "faulted" else {}
        other = _plan(cell, seed, spares, select="one") if arm == "faulted" else {}
    except Exception as error:  # a scenario of another version may hold anything
        return Expected(repeat=repeat, seed=seed, problem=f"{type(error).__name__}: {error}")
    return Expected(
        repeat=repeat,
        seed=seed,
        spares=spares,
        plan={name: facts for name, (facts, _) in planned.items()},
        most={name: most for name, (_, most) in planned.items()},
        or_else={
            fault.id: other[fault.id][0] for fault in scenario.faults if _is_loose(fault) and other
        },
    )


def _plan(
    cell: Cell, seed: int, spares: int, *, select: Literal["all", "one"]
) -> dict[str, tuple[Facts, int]]:
    """Fault -> announcement and largest number of injections. ``select``: the part of a replica to
    hit where the scenario leaves it open.
    """
    kinds = load(FAULTS, Fault)
    faults = [
        _of_replica(fault, select) if _is_loose(fault) else fault for fault in cell.scenario.faults
    ]
    scenario = cell.scenario.model_copy(update={"faults": faults})
    plan = plan_scenario(scenario, kinds, seed=seed, spares=spares)
    return {
        each.id: (json.loads(json.dumps(announcement(each))), _most(each.planned))
        for each in triggers(plan, kinds, ranks=scenario.workload.ranks)
    }


def _is_loose(fault: FaultSpec) -> bool:
    """Whether it may hit a whole replica or one rank of it: a resolved scenario holds every
    default, so it does not show whether ``select`` was written.
    """
    return fault.target.replica is not None and fault.target.select == TargetSpec().select


def _of_replica(fault: FaultSpec, select: Literal["all", "one"]) -> FaultSpec:
    """The fault with a target of the whole replica, or of one rank of it."""
    return fault.model_copy(update={"target": fault.target.model_copy(update={"select": select})})


def _most(planned: PlannedFault) -> int:
    """Largest number of injections: each trigger ``max_fires`` times on each target."""
    triggers = len(planned.points) + len(planned.times_s) + (planned.event is not None)
    targets = max(
        len(planned.ranks) + len(planned.spares), len(planned.nodes), len(planned.links), 1
    )
    return triggers * targets * planned.max_fires


def twins_of(logs: Mapping[str, Log], simulated: Mapping[str, bool]) -> dict[str, tuple[str, ...]]:
    """Arm -> arms whose log is the same except for the names in it; ``simulated``: arm -> whether
    it was simulated.

    Two real arms never share nanoseconds. Simulated arms do if everything that decides is equal:
    the seed, and all settings that matter, even if the cell or the kind of arm differs (a bound, a
    description, a fault that does not occur).
    """
    outlines: dict[tuple[Any, ...], list[str]] = {}
    for name, log in logs.items():
        if log.first(Kind.RUN_STARTED) is not None and any(True for _ in log.of(*_DONE)):
            outlines.setdefault(_outline(log), []).append(name)
    alike: dict[str, list[str]] = {}
    for names in outlines.values():
        for name in names if len(names) > 1 else ():
            alike.setdefault(_content(logs[name], simulated=simulated[name]), []).append(name)
    found: dict[str, tuple[str, ...]] = {}
    for names in alike.values():
        for one, other in itertools.permutations(names, 2):
            if not (simulated[one] and simulated[other] and _may_be_alike(logs[one], logs[other])):
                found[one] = (*found.get(one, ()), other)
    return found


def _may_be_alike(one: Log, other: Log) -> bool:
    first, second = (log.first(Kind.RUN_STARTED) for log in (one, other))
    assert first is not None and second is not None
    same = all(first.data[key] == second.data[key] for key in ("repeat", "seed"))
    return same and any(first.data[key] != second.data[key] for key in ("cell", "arm"))


def _outline(log: Log) -> tuple[Any, ...]:
    """What logs with the same content have in common, and few others: the last times of actors."""
    started = log.first(Kind.RUN_STARTED)
    start_ns = started.time_ns if started else 0
    return tuple(
        (name, len(actor.events), *(last.time_ns - start_ns for last in actor.events[-1:]))
        for name, actor in sorted(log.actors.items())
    )


def _content(log: Log, *, simulated: bool) -> str:
    """A digest of what happened when; in a simulation, where times alone prove nothing, also of the
    results.
    """
    started = log.first(Kind.RUN_STARTED)
    start_ns = started.time_ns if started else 0
    found = hashlib.blake2b(digest_size=16)
    for name, actor in sorted(log.actors.items()):
        found.update(f"{name}:{len(actor.events)}\n".encode())
        for event in actor.events:
            found.update(_line(event, start_ns, simulated=simulated))
    return found.hexdigest()


def _line(event: Event, start_ns: int, *, simulated: bool) -> bytes:
    content = (
        repr(sorted(event.data.items(), key=lambda item: item[0]))
        if simulated and event.kind in _RESULTS
        else ""
    )
    return f"{event.kind.value} {event.time_ns - start_ns} {event.step} {content}\n".encode()
