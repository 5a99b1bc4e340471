"""Plays the planned faults of one arm: arms ranks, and acts when a point is reached, a time or an
event has come.

When a fault is due, and who holds for it, is decided by its trigger (``chaos.schedule.trigger``).
Ranks act by themselves when their agents hear ``go`` (``harness.inject.inside``); all else is acted
on from outside (``harness.inject.outside``). For every occurrence: undo record on disk,
``fault_injected``, the act, ``fault_landed`` once somebody else saw it (or ``fault_failed``),
``fault_healed`` (``harness.inject.occurrences``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from chaos.events.log import Event, Kind
from chaos.fault.base import Fault, Where
from chaos.schedule.plan import NO_POINT, PlannedFault, Point
from chaos.schedule.trigger import Hold, Trigger, triggers
from harness.arm.fault_context import Scene
from harness.inject.guard import Guard
from harness.inject.inside import InsideActs
from harness.inject.occurrence import (
    LET_GO,
    NOT_HELD,
    NOT_THERE,
    POLLED,
    Act,
    Late,
    Live,
    announcement,
    to_hold_at,
)
from harness.inject.occurrences import Occurrences
from harness.inject.outside import OutsideActs
from harness.inject.sites.process import DEAD
from recovery.detection.hangs import STOPPED
from recovery.transport.wire import Extra


class _More(TypedDict, total=False):
    """What else there is to say of an act; see Act."""

    point: Point | None
    held: bool
    late: Late | None
    absent: tuple[str, ...]


class Injector:
    """Faults of one arm. ``plan`` is empty in a control arm; ``kinds``: name -> fault class."""

    def __init__(
        self, scene: Scene, plan: Sequence[PlannedFault], kinds: Mapping[str, type[Fault]]
    ) -> None:
        self._scene = scene
        self._ranks = range(scene.setup.cell.scenario.topology.ranks)
        made = triggers(plan, kinds, ranks=len(self._ranks))
        self._triggers = {trigger.id: trigger for trigger in made}
        self._struck = Occurrences(scene)
        self._guard = Guard(scene)
        self._outside = OutsideActs(scene, self._struck)
        self._inside = InsideActs(scene, self._struck)
        self._events_seen: Counter[str] = Counter()
        self._training_since_ns: int | None = None
        self._attempt = 0
        self._committed = 0
        self._holds = itertools.count()

    def announce(self) -> None:
        """Record what is planned, targets resolved."""
        for trigger in self._triggers.values():
            self._scene.record(Kind.FAULT_PLANNED, **announcement(trigger))

    # ---- what happens in the arm

    def arm(self, process: str, rank: int) -> None:
        """Tell a process that is about to take ``rank``, or has it, where it has to hold; it holds
        where it does.
        """
        points = to_hold_at(self._triggers.values(), rank, self._struck.live)
        if self._triggers:
            payload = {"points": points, "standing": self._inside.standing}
            self._scene.send(process, Extra(topic="arm", payload=payload))
        self._struck.joined(process)

    def on_said(self, process: str, rank: int | None, message: Extra) -> None:
        """A rank reached an armed point, left one without an answer, or ended a lasting fault."""
        if message.topic in ("at_point", "unanswered"):
            trigger = self._triggers[message.payload["fault"]]
            at = (message.payload["step"], message.payload["phase"])
            if message.topic == "at_point":
                self._at_point(trigger, process, rank, at)
            else:
                trigger.leave(at, rank)
                self._struck.not_fired(
                    trigger.planned, at[0], f"{process} held for it, and nobody answered"
                )
        elif live := self._struck.spoken_of(message):
            if message.topic == "healed":
                self._struck.heal(live, "ended by the rank's agent when its duration was over")
            elif message.topic == "missed" and not live.settled:
                self._again(live, "the rank had left the point: armed again")
                self.arm(process, live.occurrence.rank or 0)

    def on_training(self) -> None:
        """A generation trains. Time triggers count from the first; each may fire once in each."""
        self._attempt += 1
        self._guard.on_training()
        self._struck.trains()
        if self._training_since_ns is None:
            self._training_since_ns = self._scene.now_ns()

    def on_event(self, name: str) -> None:
        """Something a fault may wait for happened (checkpoint_committed, recovery_started, ...)."""
        self._events_seen[name] += 1
        if name == "recovery_started":
            self._guard.on_failure()
        nth = self._events_seen[name]
        for trigger in [t for t in self._triggers.values() if t.due_by_event(name, nth)]:
            trigger.fire(NO_POINT, self._attempt)
            self._fire_unheld(trigger, trigger.planned)

    def tick(self, committed: int) -> None:
        """Triggers that no rank holds for (time; steps that no rank held for), evidence, ends of
        lasting faults.
        """
        self._committed = committed
        if self._training_since_ns is not None:
            seconds = (self._scene.now_ns() - self._training_since_ns) / 1e9
            all_of_them = self._triggers.values()
            for trigger, point in [(t, p) for t in all_of_them for p in t.due_by_time(seconds)]:
                self._fire_once(trigger, point)
            for trigger, point in [(t, p) for t in all_of_them for p in t.due_by_step(committed)]:
                self._fire_at_last(trigger, point)
        for trigger, at in self._held():
            self._fire_if_all_hold(trigger, at)  # one that was waited for may have died
        self._struck.tick(committed)

    def observe(self, event: Event) -> None:
        """An event of the orchestrator: evidence, an end of those who hold, the death of one that
        was to be hit.
        """
        if event.kind in (Kind.ABORT_SENT, Kind.GENERATION_STARTED):
            for trigger in self._triggers.values():
                trigger.disperse()
        for live in self._struck.observe(event):
            self._again(live, "its target died where it held, before it took effect: armed again")

    def pending(self) -> bool:
        """Whether evidence is still looked for."""
        return self._struck.pending()

    def close(self) -> None:
        """Heal everything, on every way out; what found no evidence by now did not land. Say of
        what was due, and never came, that what it acts on was not there (a machine, a spare, a
        coordinator that is not back yet), or that ranks had held for it when they were lost.
        """
        for _, trigger in sorted(self._triggers.items()):
            for point in trigger.never_fired():
                step = point[0] if point in trigger.planned.points else None
                why = NOT_THERE if trigger.was_not_there(point) else LET_GO
                self._struck.not_fired(trigger.planned, step, why)
        self._struck.close()

    # ---- ranks that hold

    def _at_point(self, trigger: Trigger, process: str, rank: int | None, at: Point) -> None:
        if rank is not None and trigger.take_next_step((rank,)):
            self._fire_in_ranks(trigger, {rank: process}, at, None)
        elif rank is None or rank not in self._holders(trigger, at):
            self._release(trigger, process)
        else:
            number, now_ns = next(self._holds), self._scene.now_ns()
            trigger.at_point(at, rank, process, number=number, now_ns=now_ns)
            self._fire_if_all_hold(trigger, at)

    def _holders(self, trigger: Trigger, at: Point) -> set[int]:
        """The ranks that hold there, for a beginning or an end."""
        if self._struck.ending(trigger.id, at):
            return set(self._ranks)
        return trigger.holders(at, self._ranks)

    def _held(self) -> list[tuple[Trigger, Point]]:
        """Where ranks hold, in the order in which they began to."""
        held = [
            (hold.number, trigger, at)
            for trigger in self._triggers.values()
            for at, hold in trigger.holds.items()
        ]
        return [(trigger, at) for _, trigger, at in sorted(held, key=lambda one: one[0])]

    def _fire_if_all_hold(self, trigger: Trigger, at: Point) -> None:
        """End what is over there, and one act for all the ranks a fault hits, as soon as each of
        them that lives holds at the point, or has been waited for in vain. Whoever died there is
        left out: the fault is armed again with whoever takes its rank.
        """
        hold = trigger.holds.get(at)
        if hold is None:
            return
        missing = sorted(self._holders(trigger, at) - hold.processes.keys())
        absent = tuple(name for rank in missing if (name := self._scene.process_of(rank)))
        if absent and not self._in_vain(trigger, hold, absent):
            return
        trigger.go(at)
        for live in self._struck.ending(trigger.id, at):
            self._struck.heal(live, "its duration was over")
        there = {rank: name for rank, name in hold.processes.items() if self._is_there(rank, name)}
        point, hit = trigger.planned_at(at), trigger.holders(at, there)
        if point is not None and hit and not trigger.held_by_all:
            told = self._fire_held(trigger, {rank: there[rank] for rank in sorted(hit)}, point)
            there = {rank: name for rank, name in there.items() if rank not in told}
        elif point is not None and hit:
            self._fire_for_all(trigger, point, absent)
        for name in there.values():
            self._release(trigger, name)

    def _in_vain(self, trigger: Trigger, hold: Hold, absent: Iterable[str]) -> bool:
        """Whether nobody waits for these any longer. What acts on no rank is not kept waiting by
        one that the kernel shows as stopped: it may come when the step is long past.
        """
        if hold.is_long_enough(self._scene.now_ns()):
            return True
        stopped = all(self._scene.os_state(name) in STOPPED for name in absent)
        return trigger.held_by_all and stopped

    def _is_there(self, rank: int, process: str) -> bool:
        """Whether it still has the rank and lives, though its exit may not have been
        noticed yet.
        """
        return self._scene.process_of(rank) == process and self._scene.os_state(process) not in DEAD

    def _fire_held(
        self, trigger: Trigger, held: Mapping[int, str], point: Point
    ) -> Collection[int]:
        """Act on the ranks that hold; returns those whose agents are told to act, which are not to
        be released.
        """
        planned = trigger.planned
        first = not any(trigger.has_fired(point, rank) for rank in planned.ranks)
        trigger.fire_on(point, held)
        if self._refused(trigger, planned, point[0]):
            return ()
        at = trigger.acts_at(point)
        if trigger.fault.where is Where.RANK:
            self._fire_in_ranks(trigger, held, at, point)
            return held
        hit = replace(planned, ranks=tuple(held), spares=planned.spares if first else ())
        self._fire_outside(trigger, hit, at, point=point, held=True)
        return ()

    def _fire_for_all(self, trigger: Trigger, point: Point, absent: tuple[str, ...]) -> None:
        """Act on what is no rank's, while all ranks hold but those that are ``absent``."""
        planned = trigger.planned
        if not self._reachable(trigger, planned):
            trigger.not_there(point)
            return
        trigger.fire(point, self._attempt)
        if not self._refused(trigger, planned, point[0]):
            at = trigger.acts_at(point)
            self._fire_outside(trigger, planned, at, point=point, absent=absent)

    def _release(self, trigger: Trigger, process: str) -> None:
        self._scene.send(process, Extra(topic="go", payload={"act": False, "fault": trigger.id}))

    def _again(self, live: Live, why: str) -> None:
        """It never acted, as whoever was to be hit had left the point, or was dead: the occurrence
        is void, and its trigger pending again.
        """
        self._struck.void(live, why)
        trigger = self._triggers[live.planned.id]
        trigger.again(live.act.point, live.occurrence.rank or 0, live.act.number)

    # ---- triggers that no rank holds for

    def _fire_at_last(self, trigger: Trigger, point: Point) -> None:
        """Fire at a step that no rank holds for, or for which none came to hold, and say how late
        it is.
        """
        steps, why = self._committed + 1 - point[0], POLLED
        if trigger.held_by_all:
            why = LET_GO if trigger.was_let_go(point) else NOT_HELD
            why = NOT_THERE if trigger.was_not_there(point) else why
            is_held = trigger.acts_at(point) in trigger.holds
            # A save belongs to the step before it, so that only the next one shows that ranks went
            # past the point.
            if trigger.has_fired(point) or (why != NOT_THERE and (steps < 2 or is_held)):
                return
        self._fire_once(trigger, point, Late(steps=steps, why=why) if steps > 0 else None)

    def _fire_once(self, trigger: Trigger, point: Point, late: Late | None = None) -> None:
        """Fire, if it has not yet in this attempt and somebody is there to be hit."""
        planned = trigger.planned.aimed(point)
        if trigger.fired_in(point, self._attempt):
            return
        if not self._reachable(trigger, planned):
            trigger.not_there(point)
            return
        trigger.fire(point, self._attempt)
        self._fire_unheld(trigger, planned, late)

    def _reachable(self, trigger: Trigger, planned: PlannedFault) -> bool:
        if trigger.fault.where is Where.RANK:
            return all(self._scene.process_of(rank) for rank in planned.ranks)
        return self._outside.reachable(planned, trigger.fault)

    def _fire_unheld(
        self, trigger: Trigger, planned: PlannedFault, late: Late | None = None
    ) -> None:
        """Fire at targets none of which holds."""
        if self._refused(trigger, planned, None):
            return
        if trigger.fault.where is not Where.RANK:
            self._fire_outside(trigger, planned, None, late=late)
            return
        act = self._struck.next_number(planned)
        for rank in planned.ranks:
            # Only its training thread can act, at the next step: whoever holds the rank is told to
            # hold there.
            trigger.wait_for_next_step((rank,), act)
            process = self._scene.process_of(rank)
            if process:
                self.arm(process, rank)

    def _refused(self, trigger: Trigger, planned: PlannedFault, step: int | None) -> bool:
        """Whether the blast radius forbids an occurrence that is due; it is then recorded as
        failed.
        """
        reason = self._guard.refusal(planned, trigger.fault, self._struck.live)
        if reason is not None:
            self._struck.not_fired(planned, step, reason)
        return reason is not None

    # ---- acting

    def _fire_in_ranks(
        self, trigger: Trigger, held: Mapping[int, str], at: Point, point: Point | None
    ) -> None:
        """Have the agents in the ranks act. ``at``: where they hold; ``point``: the planned one,
        None where no step was named.
        """
        if not trigger.fault.everywhere:
            act = self._act(trigger, trigger.planned, at, held, point=point, held=True)
            self._inside.do(act, held)
            return
        act = self._act(trigger, trigger.planned, at, ())
        trigger.take_next_step(trigger.planned.ranks)
        self._inside.do_everywhere(act, held)
        self._arm_all(but=held)

    def _fire_outside(
        self, trigger: Trigger, planned: PlannedFault, at: Point | None, **more: Unpack[_More]
    ) -> None:
        """Act from outside on all that it aims at; whoever is to hold for its end hears of it
        before it goes on. ``planned``: with the targets it hits; the others as in Act.
        """
        if self._outside.do(self._act(trigger, planned, at, planned.ranks, **more)):
            self._arm_all()

    def _act(
        self,
        trigger: Trigger,
        planned: PlannedFault,
        at: Point | None,
        ranks: Iterable[int],
        **more: Unpack[_More],
    ) -> Act:
        """The act that is due now. ``ranks``: those it hits that may have waited for it."""
        return Act(
            planned=planned,
            fault=trigger.fault,
            number=trigger.act_of(ranks, self._struck.next_number(planned)),
            committed=self._committed if at is None else at[0] - 1,
            at=at,
            **more,
        )

    def _arm_all(self, but: Iterable[int] = ()) -> None:
        for rank in self._ranks:
            process = self._scene.process_of(rank)
            if process and rank not in but:
                self.arm(process, rank)
