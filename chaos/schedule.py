"""When and where faults fire: a pure function of the scenario and the seed.

Every choice is drawn from (seed, fault id) through SHA-256, so adding, removing or reordering other faults
changes nothing for this one, and a plan is the same on every machine and Python.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chaos.errors import ScenarioError
from chaos.scenario import CountTarget, FaultSpec, MaxRetrigger, StepsDuration, TargetSpec

Point = tuple[int, str]
Fired = Mapping[tuple[str, Point], int]

STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")
DEFAULT_PHASE = "data"
NO_POINT: Point = (0, "")
"""The point under which firings of faults triggered by time or event are counted."""
NEXT_STEP = 0
"""In a point that a rank holds at: the next step, whatever its number."""
EVERY_ATTEMPT_LIMIT = 1000
"""``every_attempt`` means this many: a job that never gets past its fault must end by itself."""


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault with everything decided.

    ``ranks``: worker ranks hit; ``spares``: indices of spares hit; ``checkpoint``: ``latest``, step, None.
    ``points``: (step, phase) pairs for step triggers, else empty, and ``time_s`` or ``event`` with ``nth``
    is set. ``max_fires``: firings per point (once = 1). ``seed``: the fault's own, below 2**32.
    """

    id: str
    kind: str
    params: Mapping[str, Any]
    ranks: tuple[int, ...]
    spares: tuple[int, ...]
    checkpoint: Literal["latest"] | int | None
    points: tuple[Point, ...]
    time_s: float | None
    event: str | None
    nth: int
    duration_s: float | None
    duration_steps: int | None
    max_fires: int
    seed: int


def plan(
    faults: Sequence[FaultSpec],
    *,
    seed: int,
    ranks: int,
    spares: int,
    phases_of: Callable[[str], tuple[str, ...]],
) -> tuple[PlannedFault, ...]:
    """Decide every target and phase. ``phases_of``: fault kind -> phases it can act at (empty: all).

    Raises ScenarioError when a fault would have no target.
    """
    return tuple(_plan_one(fault, seed, ranks, spares, phases_of(fault.kind)) for fault in faults)


def repeat_seed(seed: int, repeat: int) -> int:
    """Seed of one repeat, below 2**32, the same in every cell, so that strategies meet the same faults.

    Repeat 0: ``seed``.
    """
    return seed if repeat == 0 else _draw(seed, "repeat", repeat) % 2**32


def armed(planned: Sequence[PlannedFault], rank: int, fired: Fired) -> tuple[PlannedFault, ...]:
    """Step-triggered faults that still may fire on a rank, each with only the points left to it.

    ``fired``: (fault id, point) -> firings so far.
    """
    return tuple(left for fault in planned if rank in fault.ranks if (left := _left(fault, fired)).points)


def due_by_step(planned: Sequence[PlannedFault], committed: int, fired: Fired) -> tuple[PlannedFault, ...]:
    """Step-triggered faults on no rank (a spare, a checkpoint) that are due after ``committed`` steps.

    Each comes with only its due points: step n is due while it is computed, when n - 1 are committed.
    """
    due = []
    for fault in planned:
        left = _left(fault, fired)
        points = tuple(point for point in left.points if point[0] <= committed + 1)
        if points and not fault.ranks:
            due.append(dataclasses.replace(left, points=points))
    return tuple(due)


def due_by_time(planned: Sequence[PlannedFault], seconds: float, fired: Fired) -> tuple[PlannedFault, ...]:
    """Time-triggered faults due ``seconds`` after the first step; firings count under ``NO_POINT``."""
    return tuple(
        f for f in planned if f.time_s is not None and f.time_s <= seconds and _may_fire(f, NO_POINT, fired)
    )


def due_by_event(
    planned: Sequence[PlannedFault], name: str, nth: int, fired: Fired
) -> tuple[PlannedFault, ...]:
    """Faults due at the ``nth`` occurrence (from 1) of an event. Firings count under ``NO_POINT``."""
    return tuple(f for f in planned if f.event == name and f.nth <= nth and _may_fire(f, NO_POINT, fired))


def _left(fault: PlannedFault, fired: Fired) -> PlannedFault:
    return dataclasses.replace(fault, points=tuple(p for p in fault.points if _may_fire(fault, p, fired)))


def _may_fire(fault: PlannedFault, point: Point, fired: Fired) -> bool:
    return fired.get((fault.id, point), 0) < fault.max_fires


def _plan_one(fault: FaultSpec, seed: int, ranks: int, spares: int, phases: tuple[str, ...]) -> PlannedFault:
    at, checkpoint = fault.at, fault.target.checkpoint
    hit_ranks: tuple[int, ...] = ()
    hit_spares: tuple[int, ...] = ()
    if checkpoint is None:
        hit_ranks, hit_spares = _targets(fault, seed, ranks, spares)
    steps = at.steps or ([at.step] if at.step is not None else [])
    duration = fault.duration
    return PlannedFault(
        id=fault.id,
        kind=fault.kind,
        params=dict(fault.params),
        ranks=hit_ranks,
        spares=hit_spares,
        checkpoint=checkpoint if checkpoint is None or checkpoint == "latest" else checkpoint.step,
        points=tuple((step, _phase(fault, step, seed, phases)) for step in sorted(set(steps))),
        time_s=at.time,
        event=at.event,
        nth=at.nth,
        duration_s=None if isinstance(duration, StepsDuration) else duration,
        duration_steps=duration.steps if isinstance(duration, StepsDuration) else None,
        max_fires=_max_fires(fault),
        seed=_draw(seed, fault.id, "seed") % 2**32,
    )


def _targets(fault: FaultSpec, seed: int, ranks: int, spares: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The worker ranks and spare indices a fault hits."""
    target = fault.target
    named = target.rank if target.rank is not None else target.replica  # in ddp a replica is one rank
    if named is not None:
        if named >= ranks:
            raise _empty(fault, f"there is no rank {named} among {ranks}")
        return (named,), ()
    candidates = _candidates(target, ranks, spares)
    if not candidates:
        raise _empty(fault, f"there is no {target.role} to select from")
    count = (
        {"one": 1, "all": len(candidates)}[target.select]
        if isinstance(target.select, str)
        else target.select.count
    )
    if isinstance(target.select, CountTarget) and count > len(candidates):
        raise _empty(fault, f"cannot select {count} of {len(candidates)}")
    # Ranked by digest: the first n of n + 1 selected are the same as the n selected.
    ordered = sorted(candidates, key=lambda who: _draw(seed, fault.id, "target", *who))
    chosen = sorted(ordered[:count], key=lambda who: who[1])
    return tuple(n for role, n in chosen if role == "worker"), tuple(
        n for role, n in chosen if role == "spare"
    )


def _candidates(target: TargetSpec, ranks: int, spares: int) -> list[tuple[str, int]]:
    workers = [("worker", rank) for rank in range(ranks)] if target.role in ("worker", "any") else []
    return workers + (
        [("spare", index) for index in range(spares)] if target.role in ("spare", "any") else []
    )


def _phase(fault: FaultSpec, step: int, seed: int, phases: tuple[str, ...]) -> str:
    wanted = fault.at.phase
    if wanted is None:
        return phases[0] if phases and DEFAULT_PHASE not in phases else DEFAULT_PHASE
    if wanted != "any":
        return wanted
    choices = [phase for phase in STEP_PHASES if not phases or phase in phases] or list(phases)
    return choices[_draw(seed, fault.id, "phase", step) % len(choices)]


def _max_fires(fault: FaultSpec) -> int:
    if isinstance(fault.retrigger, MaxRetrigger):
        return fault.retrigger.max
    return 1 if fault.retrigger == "once" else EVERY_ATTEMPT_LIMIT


def _draw(*words: str | int) -> int:
    """63 bits, the same for the same words on every machine."""
    text = "\0".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def _empty(fault: FaultSpec, reason: str) -> ScenarioError:
    return ScenarioError(
        f"fault {fault.id!r} has no target: {reason}", hint="change its target, or workload.ranks"
    )
