"""State of one planned fault's trigger: where ranks hold for it, when it is due, how often it
fired.

A trigger only decides; it has no clock and no access to processes. The injector
(``harness.inject.injector``) reports events to it, and acts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.fault.build import build_all
from trainchaos.chaos.schedule.plan import (
    DEFAULT_PHASE,
    NEXT_STEP,
    NO_POINT,
    PlannedFault,
    Point,
    happens,
)

PATIENCE_S = 10.0
"""How long holding ranks wait for the others. A hung rank never arrives, and its hang is not
detected while the ranks that would miss it hold.
"""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Ranks that hold at one point. ``number``: of this hold among all of an arm, in order of their
    start; ``since_ns``: when it began; ``processes``: rank -> holding process.
    """

    number: int
    since_ns: int
    processes: dict[int, str] = field(default_factory=dict)

    def is_long_enough(self, now_ns: int) -> bool:
        """Whether the holding ranks have waited long enough for the others."""
        return now_ns - self.since_ns >= PATIENCE_S * 1e9


@dataclass(kw_only=True, eq=False)
class Trigger:
    """Trigger of one planned fault in one arm.

    A point is one of ``planned.points``; ``(n, "")`` for time number n; NO_POINT for an event. A
    point is pending until it has fired ``planned.max_fires`` times: counted per rank if the fault
    hits ranks at a step, else once for all. A firing that never acted makes the point pending again
    (``again``).
    """

    planned: PlannedFault
    fault: Fault
    _fired: Counter[tuple[Point, int | None]] = field(init=False, default_factory=Counter)
    _attempts: dict[Point, int] = field(init=False, default_factory=dict)
    _unreached: set[Point] = field(init=False, default_factory=set)
    _let_go: set[Point] = field(init=False, default_factory=set)
    _holds: dict[Point, Hold] = field(init=False, default_factory=dict)
    _at_next_step: set[int] = field(init=False, default_factory=set)
    _first_left: int = field(init=False, default=0)
    _begun: dict[int, int] = field(init=False, default_factory=dict)
    _begun_at: set[Point] = field(init=False, default_factory=set)

    @property
    def id(self) -> str:
        """The fault's id in its scenario."""
        return self.planned.id

    @property
    def held_by_all(self) -> bool:
        """Whether all ranks hold at its points: the fault acts on something outside the ranks, and
        would come too late if steps were counted from outside. Not for the coordinator, which could
        not release the ranks once it is lost.
        """
        return not self.planned.ranks and self.fault.where is not Where.COORDINATOR

    # ---- where ranks hold

    def acts_at(self, point: Point) -> Point:
        """Where ranks hold for a planned point, after the fault's own choice of phase."""
        return point[0], self.fault.point(point[1])

    def planned_at(self, at: Point) -> Point | None:
        """The planned point for which ranks hold there."""
        return next((point for point in self.planned.points if self.acts_at(point) == at), None)

    def may_fire(self, point: Point, rank: int) -> bool:
        """Whether a rank must hold at a planned point for a pending firing."""
        if self.held_by_all:
            return self._fired[point, None] < self.planned.max_fires
        return rank in self.planned.ranks and self._fired[point, rank] < self.planned.max_fires

    def arm(self, rank: int) -> tuple[Point, ...]:
        """Points with a step number where the process with ``rank`` must hold."""
        points = (point for point in self.planned.points if self.may_fire(point, rank))
        return tuple(self.acts_at(point) for point in points)

    def arm_next_step(self, rank: int) -> tuple[Point, ...]:
        """The point in its next step where the process with ``rank`` must hold, if any."""
        if rank not in self._at_next_step:
            return ()
        phases = self.fault.phases
        first = phases[0] if phases and DEFAULT_PHASE not in phases else DEFAULT_PHASE
        return ((NEXT_STEP, self.fault.point(first)),)

    def holders(self, at: Point, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that must hold there."""
        point = self.planned_at(at)
        return set() if point is None else {rank for rank in ranks if self.may_fire(point, rank)}

    @property
    def holds(self) -> Mapping[Point, Hold]:
        """Point -> the hold there now."""
        return self._holds

    def at_point(self, at: Point, rank: int, process: str, *, number: int, now_ns: int) -> None:
        """Note that a rank holds at a point. ``number``: of the hold, if this rank starts it."""
        hold = self._holds.setdefault(at, Hold(number=number, since_ns=now_ns))
        hold.processes[rank] = process

    def leave(self, at: Point, rank: int | None) -> None:
        """Note that a rank left the point without an answer."""
        hold = self._holds.get(at)
        if hold is None or rank is None:
            return
        hold.processes.pop(rank, None)
        if not hold.processes:
            self.go(at)

    def go(self, at: Point) -> None:
        """End the hold: all holding ranks were answered."""
        del self._holds[at]

    def go_in_vain(self, at: Point) -> None:
        """Note that the hold ended, and that no rank which held there for a firing was left."""
        point = self.planned_at(at)
        if point is not None:
            self._let_go.add(point)

    def disperse(self) -> None:
        """End all holds, because the generation is lost or another begins. Ranks are armed again
        when they join the next generation, which may not repeat the step.
        """
        points = (self.planned_at(at) for at in self._holds)
        self._let_go.update(point for point in points if point is not None)
        self._holds.clear()

    # ---- when it is due

    def due_by_step(self, committed: int) -> tuple[Point, ...]:
        """Points that are due after ``committed`` steps, for a fault that hits no rank (a spare, a
        checkpoint): step n is due while it is computed, when n - 1 are committed.
        """
        points = () if self.planned.ranks else self.planned.points
        return tuple(p for p in points if p[0] <= committed + 1 and self._is_left(p))

    def due_by_time(self, seconds: float) -> tuple[Point, ...]:
        """Points of all times due ``seconds`` after the first step starts."""
        times = self.planned.times_s
        while self._first_left < len(times) and not self._is_left((self._first_left, "")):
            self._first_left += 1  # of hundreds of arrivals, most are over
        points = ((number, "") for number in range(self._first_left, len(times)))
        return tuple(p for p in points if times[p[0]] <= seconds and self._is_left(p))

    def due_by_event(self, name: str, nth: int) -> bool:
        """Whether it is due at the ``nth`` occurrence (from 1) of an event: at the planned ``nth``,
        and with ``retrigger`` also at the following ones, ``max_fires`` in all.
        """
        planned = self.planned
        return (
            planned.event == name
            and planned.nth <= nth < planned.nth + planned.max_fires
            and self._is_left(NO_POINT)
            and happens(planned.probability, planned.seed, "event", nth)
        )

    def _is_left(self, point: Point) -> bool:
        return self._fired[point, None] < self.planned.max_fires

    # ---- whether it fired and acted

    def has_fired(self, point: Point, rank: int | None = None) -> bool:
        """Whether it fired at a point; ``rank``: on this rank, for a fault for which ranks hold
        separately.
        """
        return self._fired[point, rank] > 0

    def fired_in(self, point: Point, attempt: int) -> bool:
        """Whether it fired at the point in that attempt."""
        return self._attempts.get(point) == attempt

    def fire(self, point: Point, attempt: int) -> None:
        """Note a firing on all targets. ``attempt``: number of the training generation."""
        self._fired[point, None] += 1
        self._attempts[point] = attempt

    def fire_on(self, point: Point, ranks: Iterable[int]) -> bool:
        """Note a firing on these ranks, which hold there. Returns whether it is the first at the
        point; spares are hit with that, and not again where it never acted on a rank.
        """
        for rank in ranks:
            self._fired[point, rank] += 1
        first = point not in self._begun_at
        self._begun_at.add(point)
        return first

    def wait_for_next_step(self, ranks: Collection[int], act: int) -> None:
        """Note that it is due but only the ranks' own training threads can act, so the ranks must
        hold in their next step. ``act``: number of the act.
        """
        self._at_next_step.update(ranks)
        self._begun.update(dict.fromkeys(ranks, act))

    def take_next_step(self, ranks: Collection[int]) -> bool:
        """Note that these ranks reached their next step. Returns whether any of them
        was awaited.
        """
        waited = bool(self._at_next_step.intersection(ranks))
        self._at_next_step.difference_update(ranks)
        return waited

    def act_of(self, ranks: Iterable[int], new: int) -> int:
        """Number of the act that hits these ranks: one already begun that waits for them, else
        ``new``.
        """
        begun = [self._begun.pop(rank) for rank in ranks if rank in self._begun]
        return min(begun, default=new)

    def again(self, point: Point | None, rank: int, act: int) -> None:
        """Make a firing that never acted on a rank pending again. ``point``: None if it had no
        step.
        """
        self._begun[rank] = act
        if point is None:
            self._at_next_step.add(rank)
        else:
            self._fired[point, rank] -= 1

    def not_there(self, point: Point) -> None:
        """Note that it was due while its target was missing."""
        self._unreached.add(point)

    def was_not_there(self, point: Point) -> bool:
        """Whether it was due while its target was missing."""
        return point in self._unreached

    def was_let_go(self, point: Point) -> bool:
        """Whether ranks held for it when their generation was lost."""
        return point in self._let_go

    def never_fired(self) -> list[Point]:
        """Points that were due while their target was missing, or whose ranks held when their
        generation was lost, and that have not fired since.
        """
        due = self._unreached | self._let_go
        return sorted(point for point in due if not self.has_fired(point))


def triggers(
    plan: Sequence[PlannedFault], kinds: Mapping[str, type[Fault]], ranks: int
) -> tuple[Trigger, ...]:
    """A fresh trigger for each planned fault, in order. A fault that acts everywhere hits all
    ``ranks``, whatever its target says.

    Raises as ``chaos.fault.build.build``.
    """
    faults, everybody = build_all(plan, kinds), tuple(range(ranks))
    return tuple(
        Trigger(
            planned=replace(each, ranks=everybody, each=()) if faults[each.id].everywhere else each,
            fault=faults[each.id],
        )
        for each in plan
    )
