"""The trigger of one planned fault: where ranks hold for it, when it is due, how often it fired.

A trigger owns this state and decides by it; it has no clock and reaches no process. The injector
(``harness.inject.injector``) says what happens, and acts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chaos.fault.base import Fault, Where
from chaos.fault.build import build_all
from chaos.schedule.plan import DEFAULT_PHASE, NEXT_STEP, NO_POINT, PlannedFault, Point, happens

PATIENCE_S = 10.0
"""For which those who hold wait for the others. A rank that hangs never comes, and is not found to
hang as long as those who would miss it hold.
"""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Ranks that hold at one point. ``number``: of this hold among all of an arm, in the order in
    which they began; ``since_ns``: when it began; ``processes``: rank -> the process that holds.
    """

    number: int
    since_ns: int
    processes: dict[int, str] = field(default_factory=dict)

    def is_long_enough(self, now_ns: int) -> bool:
        """Whether those who hold have waited for the others for long enough."""
        return now_ns - self.since_ns >= PATIENCE_S * 1e9


@dataclass(kw_only=True, eq=False)
class Trigger:
    """Of one planned fault of one arm.

    A point is one of ``planned.points``; ``(n, "")`` for time number n; NO_POINT for an event. It
    is pending until it fires, ``planned.max_fires`` times at most: on each rank by itself where
    the fault hits ranks at a step, else once for all. A firing that never acted makes it pending
    again (``again``).
    """

    planned: PlannedFault
    fault: Fault
    _fired: Counter[tuple[Point, int | None]] = field(init=False, default_factory=Counter)
    _attempts: dict[Point, int] = field(init=False, default_factory=dict)
    _unreached: set[Point] = field(init=False, default_factory=set)
    _let_go: set[Point] = field(init=False, default_factory=set)
    _holds: dict[Point, Hold] = field(init=False, default_factory=dict)
    _at_next_step: set[int] = field(init=False, default_factory=set)
    _begun: dict[int, int] = field(init=False, default_factory=dict)

    @property
    def id(self) -> str:
        """The fault's, in its scenario."""
        return self.planned.id

    @property
    def held_by_all(self) -> bool:
        """Whether all ranks hold at its points: it acts on something that is no rank's, and would
        come too late if steps were counted from outside. The coordinator is lost while no rank
        waits for it: it could not release them.
        """
        return not self.planned.ranks and self.fault.where is not Where.COORDINATOR

    # ---- where ranks hold

    def acts_at(self, point: Point) -> Point:
        """A planned point as the fault moves it: where ranks hold."""
        return point[0], self.fault.point(point[1])

    def planned_at(self, at: Point) -> Point | None:
        """The planned point whose ranks hold there."""
        return next((point for point in self.planned.points if self.acts_at(point) == at), None)

    def may_fire(self, point: Point, rank: int) -> bool:
        """Whether a rank is to hold at a planned point for a firing that is still to come."""
        if self.held_by_all:
            return self._fired[point, None] < self.planned.max_fires
        return rank in self.planned.ranks and self._fired[point, rank] < self.planned.max_fires

    def arm(self, rank: int) -> tuple[Point, ...]:
        """Where the process with ``rank`` has to hold, of the points that name a step."""
        points = (point for point in self.planned.points if self.may_fire(point, rank))
        return tuple(self.acts_at(point) for point in points)

    def arm_next_step(self, rank: int) -> tuple[Point, ...]:
        """The point in its next step at which the process with ``rank`` has to hold, if any."""
        if rank not in self._at_next_step:
            return ()
        phases = self.fault.phases
        first = phases[0] if phases and DEFAULT_PHASE not in phases else DEFAULT_PHASE
        return ((NEXT_STEP, self.fault.point(first)),)

    def holders(self, at: Point, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that are to hold there."""
        point = self.planned_at(at)
        return set() if point is None else {rank for rank in ranks if self.may_fire(point, rank)}

    @property
    def holds(self) -> Mapping[Point, Hold]:
        """Where ranks hold now -> who."""
        return self._holds

    def at_point(self, at: Point, rank: int, process: str, *, number: int, now_ns: int) -> None:
        """A rank holds there. ``number``: of the hold, if it begins with this rank."""
        hold = self._holds.setdefault(at, Hold(number=number, since_ns=now_ns))
        hold.processes[rank] = process

    def leave(self, at: Point, rank: int | None) -> None:
        """A rank left the point without an answer."""
        hold = self._holds.get(at)
        if hold is None or rank is None:
            return
        hold.processes.pop(rank, None)
        if not hold.processes:
            self.go(at)

    def go(self, at: Point) -> None:
        """The hold there is over: all who hold are answered."""
        del self._holds[at]

    def disperse(self) -> None:
        """All ranks leave their points, as the generation is lost or another begins. They are armed
        with the place they take next, where the step may not come again.
        """
        if self.held_by_all:
            points = (self.planned_at(at) for at in self._holds)
            self._let_go.update(point for point in points if point is not None)
        self._holds.clear()

    # ---- when it is due

    def due_by_step(self, committed: int) -> tuple[Point, ...]:
        """Points of a fault on no rank (a spare, a checkpoint) that are due after ``committed``
        steps: step n is due while it is computed, when n - 1 are committed.
        """
        points = () if self.planned.ranks else self.planned.points
        return tuple(p for p in points if p[0] <= committed + 1 and self._is_left(p))

    def due_by_time(self, seconds: float) -> tuple[Point, ...]:
        """Points of times that are due ``seconds`` after the first step starts."""
        times = enumerate(self.planned.times_s)
        points = ((number, "") for number, time_s in times if time_s <= seconds)
        return tuple(point for point in points if self._is_left(point))

    def due_by_event(self, name: str, nth: int) -> bool:
        """Whether it is due at the ``nth`` occurrence (from 1) of an event: its own ``nth``, and
        with ``retrigger`` also those that follow, so many in all.
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

    # ---- what became of it

    def has_fired(self, point: Point, rank: int | None = None) -> bool:
        """At a point; ``rank``: on this one, for a fault that ranks hold for one by one."""
        return self._fired[point, rank] > 0

    def fired_in(self, point: Point, attempt: int) -> bool:
        """Whether it fired there in that attempt."""
        return self._attempts.get(point) == attempt

    def fire(self, point: Point, attempt: int) -> None:
        """It fires, on all its targets. ``attempt``: number of the generation that trains."""
        self._fired[point, None] += 1
        self._attempts[point] = attempt

    def fire_on(self, point: Point, ranks: Iterable[int]) -> None:
        """It fires on these ranks, which hold there."""
        for rank in ranks:
            self._fired[point, rank] += 1

    def wait_for_next_step(self, ranks: Collection[int], act: int) -> None:
        """It is due, and only the ranks' own training threads can act: they are to hold in their
        next step. ``act``: number of the act.
        """
        self._at_next_step.update(ranks)
        self._begun.update(dict.fromkeys(ranks, act))

    def take_next_step(self, ranks: Collection[int]) -> bool:
        """These have come to it. Whether any of them was waited for."""
        waited = bool(self._at_next_step.intersection(ranks))
        self._at_next_step.difference_update(ranks)
        return waited

    def act_of(self, ranks: Iterable[int], new: int) -> int:
        """Number of the act that hits these ranks: one that began with others and waits for them,
        else ``new``.
        """
        begun = [self._begun.pop(rank) for rank in ranks if rank in self._begun]
        return min(begun, default=new)

    def again(self, point: Point | None, rank: int, act: int) -> None:
        """The firing on a rank never acted: it is pending again. ``point``: None where no step was
        named.
        """
        self._begun[rank] = act
        if point is None:
            self._at_next_step.add(rank)
        else:
            self._fired[point, rank] -= 1

    def not_there(self, point: Point) -> None:
        """It was due, and what it acts on was not there."""
        self._unreached.add(point)

    def was_not_there(self, point: Point) -> bool:
        """Whether it was due while what it acts on was not there."""
        return point in self._unreached

    def was_let_go(self, point: Point) -> bool:
        """Whether the generation was lost whose ranks held for it."""
        return point in self._let_go

    def never_fired(self) -> list[Point]:
        """Points that were due while what it acts on was not there, or whose ranks held when their
        generation was lost, and that have not fired since.
        """
        due = self._unreached | self._let_go
        return sorted(point for point in due if not self.has_fired(point))


def triggers(
    plan: Sequence[PlannedFault], kinds: Mapping[str, type[Fault]], ranks: int
) -> tuple[Trigger, ...]:
    """One for each planned fault, in order; nothing has happened yet. A fault that acts everywhere
    hits all ``ranks``, whatever its target says.

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
