"""A fault's act, its occurrences from injection to heal, and the ``fault_planned`` record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from trainchaos.chaos.events.following import Follower
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import Occurrence
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.fault.witness import effects_of
from trainchaos.chaos.schedule.plan import DEFAULT_PHASE, PlannedFault, Point
from trainchaos.chaos.schedule.trigger import Trigger
from trainchaos.harness.inject.sites import OccurrenceTarget

NOT_HELD = "no rank held for it where it was planned"
NOT_THERE = "what it acts on was not there when it was due"
LET_GO = "ranks held for it where it was planned, and their generation was lost before it acted"
POLLED = "no rank holds for a fault of its kind"


@dataclass(frozen=True, kw_only=True)
class LateAct:
    """An act that came ``steps`` after its step, and why. ``missed``: ranks should have held for
    it.
    """

    steps: int
    why: str

    def recorded(self) -> dict[str, Any]:
        """Fields of ``fault_injected``."""
        return {"late_steps": self.steps, "late": self.why, "missed": self.why == NOT_HELD}


@dataclass(frozen=True, kw_only=True)
class Act:
    """One act of a fault, which hits all its targets at once; each target is an occurrence.

    ``planned``: the plan, limited to the targets that this act hits; ``number``: the number of its
    first occurrence; ``committed``: steps committed when it acts; ``at``: step and phase at which
    ranks hold, None if no rank holds; ``point``: the planned point that it was due at, None if no
    step was named; ``held``: whether the processes it hits hold for it; ``absent``: processes that
    did not arrive where the others hold.
    """

    planned: PlannedFault
    fault: Fault
    number: int
    committed: int
    at: Point | None = None
    point: Point | None = None
    held: bool = False
    late: LateAct | None = None
    absent: tuple[str, ...] = ()


@dataclass(kw_only=True)
class LiveOccurrence:
    """An occurrence between injection and heal. ``aim``: None if the target was not there;
    ``tails``: followers of the event files searched for evidence; ``heard``: processes that wrote
    those files; ``weighed``: how many of the events ``seen`` have been examined; ``settled``: it is
    known whether the fault landed; ``waited_ns``: time in which its effect could have shown;
    ``uncovered``: its process was notified that the fault is over; ``records``: its ledger records,
    closed when it is undone.
    """

    act: Act
    occurrence: Occurrence
    aim: OccurrenceTarget | None
    tails: list[Follower]
    heard: set[str]
    seen: list[Event] = field(default_factory=list)
    weighed: int = -1
    settled: bool = False
    healed: bool = False
    looked: bool = False
    waited_ns: int = 0
    uncovered: bool = False
    records: list[str] = field(default_factory=list)

    @property
    def planned(self) -> PlannedFault:
        """The plan, limited to the targets of its act."""
        return self.act.planned

    @property
    def fault(self) -> Fault:
        """The fault that acts."""
        return self.act.fault

    @property
    def held(self) -> bool:
        """Whether its process held for it when it was injected."""
        ranked = self.occurrence.rank is not None
        return self.act.held and ranked and self.fault.where in (Where.PROCESS, Where.RANK)

    @property
    def all_ended(self) -> bool:
        """Whether every process that it hit was seen to end since."""
        ended = {e.data["process"] for e in self.seen if e.kind is Kind.PROCESS_EXITED}
        return bool(self.occurrence.processes) and ended.issuperset(self.occurrence.processes)

    @cached_property
    def until_ns(self) -> int | None:
        """When it must be ended from outside, if its duration is a time."""
        seconds = self.planned.duration_s
        if seconds is None or self.fault.where is Where.RANK:
            return None
        return self.occurrence.time_ns + int(seconds * 1e9)

    @cached_property
    def until_step(self) -> int | None:
        """The step count at which it must be ended from outside, if its duration is in steps."""
        steps = self.planned.duration_steps
        if steps is None or self.fault.where is Where.RANK:
            return None
        return self.act.committed + steps

    @cached_property
    def lasts(self) -> bool:
        """Whether it continues until something ends it."""
        timed = self.until_ns is not None or self.until_step is not None
        return self.fault.lasting or self.fault.everywhere or timed

    @property
    def ends_at(self) -> Point | None:
        """Where ranks hold for its end, if it lasts for steps and is ended from outside."""
        last = self.until_step
        return None if last is None or self.healed else (last + 1, DEFAULT_PHASE)

    def is_over(self, now_ns: int, committed: int) -> bool:
        """Whether its duration is over at ``now_ns``, or with ``committed`` steps done."""
        by_time = self.until_ns is not None and now_ns >= self.until_ns
        return by_time or (self.until_step is not None and committed >= self.until_step)

    def overdue(self, committed: int) -> str:
        """Suffix for the heal record: how many steps late the heal is."""
        late = committed - self.until_step if self.until_step is not None else 0
        return f", {late} step{'s' if late > 1 else ''} late" if late > 0 else ""


def died_holding(live: LiveOccurrence) -> bool:
    """Whether its process, which has exited, died at the point where it held, before it acted: it
    wrote no later event, and no script rank reported the act.
    """
    ours, since_ns = live.occurrence.processes, live.occurrence.time_ns
    wrote = any(event.actor in ours and event.time_ns > since_ns for event in live.seen)
    said = any("script" in evidence for evidence in effects_of(live.occurrence, live.seen))
    return not wrote and not said


def to_hold_at(
    triggers: Iterable[Trigger], rank: int, struck: Iterable[LiveOccurrence]
) -> list[dict[str, Any]]:
    """The points at which the process of ``rank`` must hold, in the form its agent expects: planned
    steps, its next step, and the ends of lasting faults. ``struck``: occurrences that may have such
    ends.
    """
    triggers = list(triggers)
    points = [(each.planned, at) for each in triggers for at in each.arm(rank)]
    points += [(each.planned, at) for each in triggers for at in each.arm_next_step(rank)]
    points += [(live.planned, live.ends_at) for live in struck if live.ends_at]
    seeds = {(planned.id, *at): planned.seed for planned, at in points}
    return [
        {"fault": fault, "step": step, "phase": phase, "seed": seed}
        for (fault, step, phase), seed in seeds.items()
    ]


def command_of(live: LiveOccurrence, *, ahead: int = 0) -> dict[str, Any]:
    """The command that makes a rank's agent act, for an act that ranks hold for. ``ahead``: how
    many steps ranks that do not hold may be ahead of those that do.
    """
    planned, at = live.planned, live.act.at
    assert at is not None
    return {
        "act": True,
        "fault": planned.id,
        "occurrence": live.occurrence.number,
        "kind": planned.kind,
        "params": planned.params,
        "duration_s": planned.duration_s,
        "duration_steps": planned.duration_steps,
        "step": at[0],
        "due_step": at[0] + ahead,
        "seed": planned.seed,
    }


def announcement(trigger: Trigger) -> dict[str, Any]:
    """Fields of ``fault_planned``: targets resolved, points as the fault moves them."""
    planned, fault = trigger.planned, trigger.fault
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
            "points": [list(trigger.acts_at(point)) for point in planned.points],
            "times_s": planned.times_s,
            "event": planned.event,
            "nth": planned.nth,
            "probability": planned.probability,
            "declined": planned.declined,
            "fires": planned.max_fires,
        },
    }


def undone(live: LiveOccurrence) -> str | None:
    """Undo an occurrence's act, from outside. Returns a remark for the log, or None if part of the
    act could not be undone.
    """
    if live.aim is None:
        return ""
    if live.fault.where is not Where.RANK:
        try:
            live.fault.heal(live.aim.target)
            return ""
        except Exception as error:
            remark = f"; by its undo record, since {type(error).__name__}: {error}"
            # The records undo the same act; what they cannot undo either stays unhealed, and
            # unsafe.
            return (
                remark if live.aim.undo and all(undo.undo().ok for undo in live.aim.undo) else None
            )
    # A rank undoes its own acts; if it died first, its records do.
    return "" if all(undo.undo().ok for undo in live.aim.undo) else None
