"""One occurrence of a fault between its injection and its heal, and what is written about a plan
beforehand.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from chaos.events.following import Follower
from chaos.events.log import Event
from chaos.fault.base import Fault, Occurrence, Where
from chaos.fault.witness import effects_of
from chaos.schedule.plan import DEFAULT_PHASE, NEXT_STEP, PlannedFault, Point
from harness.inject.sites import Aim
from recovery.transport.wire import Extra

NOT_HELD = "no rank held for it where it was planned"
NOT_THERE = "what it acts on was not there when it was due"
LET_GO = "ranks held for it where it was planned, and their generation was lost before it acted"
POLLED = "no rank holds for a fault of its kind"


@dataclass(frozen=True, kw_only=True)
class Late:
    """An act that came after its step: so many ``steps``, and why. ``missed``: ranks should have
    held for it.
    """

    steps: int
    why: str

    def recorded(self) -> dict[str, Any]:
        """For ``fault_injected``."""
        return {"late_steps": self.steps, "late": self.why, "missed": self.why == NOT_HELD}


@dataclass(kw_only=True)
class Live:
    """An occurrence between injection and heal. ``aim``: None for a target that was not there;
    ``point``: the planned one it was due at; ``held``: its process held there when it was injected;
    ``act``: number of the first occurrence of the act it is of, which hits all its targets at once;
    ``committed``: steps done when it was injected; ``heard``: whose lines are read for evidence;
    ``weighed``: how many of the events ``seen`` were looked at for it; ``waited_ns``: for how long
    its effect could have shown; ``uncovered``: its process was told that it is over.
    """

    planned: PlannedFault
    fault: Fault
    occurrence: Occurrence
    aim: Aim | None
    until_ns: int | None
    until_step: int | None
    tails: list[Follower]
    heard: set[str] = field(default_factory=set)
    seen: list[Event] = field(default_factory=list)
    weighed: int = -1
    settled: bool = False
    healed: bool = False
    looked: bool = False
    point: Point | None = None
    held: bool = False
    late: Late | None = None
    act: int = 0
    committed: int = 0
    waited_ns: int = 0
    uncovered: bool = False
    records: list[str] = field(default_factory=list)

    @property
    def lasts(self) -> bool:
        """Whether it goes on until something ends it."""
        timed = self.until_ns is not None or self.until_step is not None
        return self.fault.lasting or self.fault.everywhere or timed

    @property
    def ends_at(self) -> Point | None:
        """Where ranks hold for its end, if it lasts for steps and its end comes from outside."""
        return (
            None if self.until_step is None or self.healed else (self.until_step + 1, DEFAULT_PHASE)
        )

    def overdue(self, committed: int) -> str:
        """How much later than planned it is with so many steps done, for its heal."""
        late = committed - self.until_step if self.until_step is not None else 0
        return f", {late} step{'s' if late > 1 else ''} late" if late > 0 else ""


def spoken_of(struck: Sequence[Live], message: Extra) -> Live | None:
    """The occurrence that a rank's message is about."""
    about = (message.payload.get("fault"), message.payload.get("occurrence"))
    return next(
        (live for live in struck if (live.occurrence.fault, live.occurrence.number) == about), None
    )


def died_holding(live: Live) -> bool:
    """Whether its process, which has ended, never left the point it held at, and did not act: it
    wrote nothing more, and as a command's rank it did not say so.
    """
    ours, since_ns = live.occurrence.processes, live.occurrence.time_ns
    wrote = any(event.actor in ours and event.time_ns > since_ns for event in live.seen)
    said = any("script" in evidence for evidence in effects_of(live.occurrence, live.seen))
    return not wrote and not said


def held_by_all(planned: PlannedFault, fault: Fault) -> bool:
    """Whether all ranks hold at its points: it acts on something that is no rank's, and would come
    too late if whoever counts steps from outside had to notice. The coordinator is lost while
    nobody waits for it: it could not release them.
    """
    return not planned.ranks and fault.where is not Where.COORDINATOR


def to_hold_at(
    plan: Sequence[PlannedFault],
    faults: Mapping[str, Fault],
    rank: int,
    fired: Mapping[Any, int],
    waiting: Container[tuple[str, int]],
    struck: Iterable[Live] = (),
) -> list[dict[str, Any]]:
    """The points at which whoever holds ``rank`` is to hold. ``waiting``: (fault, rank) due at the
    next step; ``struck``: faults that may have ends to hold for.
    """
    points = {
        (planned.id, step, faults[planned.id].point(phase)): planned.seed
        for planned in plan
        for step, phase in planned.points
        if may_fire(planned, faults[planned.id], (step, phase), rank, fired)
    }
    for planned in plan:
        if (planned.id, rank) in waiting:
            fault = faults[planned.id]
            points[planned.id, NEXT_STEP, fault.point(first_phase(fault))] = planned.seed
    points |= {
        (live.planned.id, *live.ends_at): live.planned.seed for live in struck if live.ends_at
    }
    return [
        {"fault": fault, "step": step, "phase": phase, "seed": seed}
        for (fault, step, phase), seed in points.items()
    ]


def may_fire(
    planned: PlannedFault, fault: Fault, point: Point, rank: int, fired: Mapping[Any, int]
) -> bool:
    """Whether a rank is to hold at a point for a firing that is still to come."""
    if held_by_all(planned, fault):
        return fired.get((planned.id, point), 0) < planned.max_fires
    return rank in planned.ranks and fired.get((planned.id, point, rank), 0) < planned.max_fires


def first_phase(fault: Fault) -> str:
    """The first phase of a step in which a fault can act."""
    return fault.phases[0] if fault.phases and DEFAULT_PHASE not in fault.phases else DEFAULT_PHASE


def widened(
    plan: Sequence[PlannedFault], kinds: Mapping[str, type[Fault]], ranks: int
) -> tuple[PlannedFault, ...]:
    """The plan, in which faults that act everywhere hit all ranks."""
    everybody = tuple(range(ranks))
    return tuple(
        replace(each, ranks=everybody, each=()) if kinds[each.kind].everywhere else each
        for each in plan
    )


def command_of(planned: PlannedFault, live: Live, step: int) -> dict[str, Any]:
    """What a rank's agent is told to do. ``step``: of the injection."""
    return {
        "act": True,
        "fault": planned.id,
        "occurrence": live.occurrence.number,
        "kind": planned.kind,
        "params": planned.params,
        "duration_s": planned.duration_s,
        "duration_steps": planned.duration_steps,
        "step": step,
        "seed": planned.seed,
    }


def announcement(planned: PlannedFault, fault: Fault, points: Sequence[Point]) -> dict[str, Any]:
    """What ``fault_planned`` says. ``points``: the planned ones, as the fault moves them."""
    timed = planned.duration_s is not None or planned.duration_steps is not None
    return {
        "fault": planned.id,
        "kind": planned.kind,
        "lasts": fault.lasting or fault.may_last or fault.everywhere or timed,
        "target": {
            "ranks": planned.ranks,
            "spares": planned.spares,
            "nodes": planned.nodes,
            "links": planned.links,
            "checkpoint": planned.checkpoint,
            "each": [asdict(targets) for targets in planned.each],
        },
        "at": {
            "points": [list(point) for point in points],
            "times_s": planned.times_s,
            "event": planned.event,
            "nth": planned.nth,
            "probability": planned.probability,
            "declined": planned.declined,
            "fires": planned.max_fires,
        },
    }


def undone(live: Live) -> str | None:
    """Undo an occurrence's act, from outside; a remark for the log, or None when something of it is
    left.
    """
    if live.aim is None:
        return ""
    if live.fault.where is not Where.RANK:
        try:
            live.fault.heal(live.aim.target)
            return ""
        except Exception as error:
            remark = f"; by its undo record, since {type(error).__name__}: {error}"
            # The records undo the same; what even they cannot undo stays unhealed, and unsafe.
            return (
                remark if live.aim.undo and all(undo.undo().ok for undo in live.aim.undo) else None
            )
    # A rank undoes its own; what it could not, being dead, its records do.
    return "" if all(undo.undo().ok for undo in live.aim.undo) else None
