"""Plays the planned faults of one arm: arms ranks, and acts when a point, time or event is due.

Each fault's trigger (``chaos.schedule.trigger``) decides when it is due and which ranks hold for
it. Agents inside ranks act when they receive ``go``; every other fault acts from outside
(``harness.inject.acts``). Order for every occurrence: undo record on disk,
``fault_injected``, the act, ``fault_landed`` once an independent witness saw it (or
``fault_failed``), ``fault_healed`` (``harness.inject.occurrences``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.schedule.blast import Damage, nodes_hit, ranks_hit, refusal
from trainchaos.chaos.schedule.plan import NO_POINT, PlannedFault, Point
from trainchaos.chaos.schedule.trigger import Hold, Trigger, triggers
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.acts import Acts
from trainchaos.harness.inject.occurrences import (
    LET_GO,
    NOT_HELD,
    NOT_THERE,
    POLLED,
    Act,
    LateAct,
    LiveOccurrence,
    Occurrences,
    announcement,
    to_hold_at,
)
from trainchaos.harness.inject.sites.process import DEAD
from trainchaos.recovery.detection.hangs import STOPPED
from trainchaos.recovery.transport.wire import Extra


class Guard:
    """Keeps an arm within its scenario's blast radius: checks every occurrence against the damage
    so far. It must be notified when the job breaks and when it trains again.
    """

    def __init__(self, scene: Scene) -> None:
        scenario = scene.setup.cell.scenario
        self._scene = scene
        self._limits = scenario.blast_radius
        self._topology = scenario.topology
        self._recovering = False
        self._whole_since_ns = 0

    def on_failure(self) -> None:
        """A failure was declared."""
        self._recovering = True

    def on_training(self) -> None:
        """A generation trains: the job has recovered from all healed faults."""
        self._recovering = False
        self._whole_since_ns = self._scene.now_ns()

    def refusal(
        self, planned: PlannedFault, fault: Fault, struck: Sequence[LiveOccurrence]
    ) -> str | None:
        """Why an occurrence due now must not fire; None when it may."""
        active = [live for live in struck if not live.healed or self._is_being_answered(live)]
        stopped = set(self._ranks_of(live for live in active if _disables(live.fault)))
        held = {rank for rank in range(self._topology.ranks) if self._scene.process_of(rank)}
        occurrences = {(live.planned.id, live.occurrence.time_ns) for live in active}
        down = frozenset(
            node for live in active if _disables(live.fault) for node in live.planned.nodes
        )
        damage = Damage(
            active=len(occurrences), healthy=self._topology.whole(held - stopped), nodes=down
        )
        ranks = ranks_hit(planned, fault.where, self._topology)
        shards = self._topology.shards
        return refusal(
            self._limits,
            damage,
            ranks=ranks,
            disables=_disables(fault),
            shards=shards,
            nodes=nodes_hit(planned, fault.where, self._topology),
            whole=planned.nodes,
        )

    def _is_being_answered(self, live: LiveOccurrence) -> bool:
        """Whether the job is still recovering from it."""
        after = live.occurrence.time_ns >= self._whole_since_ns
        return self._recovering and after and not live.fault.harmless

    def _ranks_of(self, struck: Iterable[LiveOccurrence]) -> Iterable[int]:
        for live in struck:
            yield from ranks_hit(live.planned, live.fault.where, self._topology)


def _disables(fault: Fault) -> bool:
    """Whether the replicas that the fault hits stop being healthy."""
    return not fault.harmless and fault.where in (Where.PROCESS, Where.RANK, Where.NODE)


class _More(TypedDict, total=False):
    """Optional fields of an act; see Act."""

    point: Point | None
    held: bool
    late: LateAct | None
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
        self._acts = Acts(scene, self._struck)
        self._events_seen: Counter[str] = Counter()
        self._training_since_ns: int | None = None
        self._attempt = 0
        self._committed = 0
        self._holds = itertools.count()

    def announce(self) -> None:
        """Record the planned faults, targets resolved."""
        for trigger in self._triggers.values():
            self._scene.record(Kind.FAULT_PLANNED, **announcement(trigger))

    # ---- what happens in the arm

    def arm(self, process: str, rank: int) -> None:
        """Send the points to hold at to a process that has ``rank`` or is about to take it."""
        points = to_hold_at(self._triggers.values(), rank, self._struck.live)
        if self._triggers:
            payload = {"points": points, "standing": self._acts.standing}
            self._scene.send(process, Extra(topic="arm", payload=payload))
        self._struck.joined(process)

    def on_said(self, process: str, rank: int | None, message: Extra) -> None:
        """A rank reached an armed point, left one unanswered, or ended a lasting fault."""
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
        """A generation trains. Time triggers count from the first one, and may fire once per
        generation.
        """
        self._attempt += 1
        self._guard.on_training()
        self._struck.trains()
        if self._training_since_ns is None:
            self._training_since_ns = self._scene.now_ns()

    def on_event(self, name: str) -> None:
        """An event that a fault may wait for happened (checkpoint_committed, recovery_started,
        ...).
        """
        self._events_seen[name] += 1
        if name == "recovery_started":
            self._guard.on_failure()
        nth = self._events_seen[name]
        for trigger in [t for t in self._triggers.values() if t.due_by_event(name, nth)]:
            trigger.fire(NO_POINT, self._attempt)
            self._fire_unheld(trigger, trigger.planned)

    def tick(self, committed: int) -> None:
        """Fire triggers that no rank holds for (times; steps that ranks did not hold for), look for
        evidence, and end lasting faults whose duration is over.
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
            self._fire_if_all_hold(trigger, at)  # a rank that it waited for may have died
        self._struck.tick(committed)

    def observe(self, event: Event) -> None:
        """Handle an orchestrator event: evidence, ranks that no longer hold, or the death of a
        target before the fault acted on it.
        """
        if event.kind in (Kind.ABORT_SENT, Kind.GENERATION_STARTED):
            for trigger in self._triggers.values():
                trigger.disperse()
        for live in self._struck.observe(event):
            self._again(live, "its target died where it held, before it took effect: armed again")

    def pending(self) -> bool:
        """Whether some occurrence still waits for evidence."""
        return self._struck.pending()

    def close(self) -> None:
        """Heal everything, on every way out. Occurrences without evidence did not land. A trigger
        that was due and never fired is recorded with its reason: its target was not there (a
        machine, a spare, a coordinator not yet back), or its generation was lost while ranks held.
        """
        for _, trigger in sorted(self._triggers.items()):
            # A fault that hit a rank and was armed again fires at its next step, at no point.
            acted = not trigger.held_by_all and self._struck.next_number(trigger.planned) > 0
            for point in trigger.never_fired():
                step = point[0] if point in trigger.planned.points else None
                absent = trigger.was_not_there(point)
                if absent or not acted:
                    why = NOT_THERE if absent else LET_GO
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
        """The ranks that hold at this point, for the start or the end of a fault."""
        if self._struck.ending(trigger.id, at):
            return set(self._ranks)
        return trigger.holders(at, self._ranks)

    def _held(self) -> list[tuple[Trigger, Point]]:
        """Where ranks hold, in the order in which they began to hold."""
        held = [
            (hold.number, trigger, at)
            for trigger in self._triggers.values()
            for at, hold in trigger.holds.items()
        ]
        return [(trigger, at) for _, trigger, at in sorted(held, key=lambda one: one[0])]

    def _fire_if_all_hold(self, trigger: Trigger, at: Point) -> None:
        """Once every living rank that must hold at the point does, or the wait is over, heal the
        occurrences that end there and do one act on all ranks that the fault hits. Ranks that died
        there are left out: the fault is armed again with the next process of the rank.
        """
        hold = trigger.holds.get(at)
        if hold is None:
            return
        missing = sorted(self._holders(trigger, at) - hold.processes.keys())
        absent = tuple(name for rank in missing if (name := self._scene.process_of(rank)))
        if absent and not self._may_stop_waiting(trigger, hold, absent):
            return
        trigger.go(at)
        for live in self._struck.ending(trigger.id, at):
            self._struck.heal(live, "its duration was over")
        there = {rank: name for rank, name in hold.processes.items() if self._is_there(rank, name)}
        point, hit = trigger.planned_at(at), trigger.holders(at, there)
        if point is not None and hit and not trigger.held_by_all:
            acting = self._fire_held(trigger, {rank: there[rank] for rank in sorted(hit)}, point)
            there = {rank: name for rank, name in there.items() if rank not in acting}
        elif point is not None and hit:
            self._fire_for_all(trigger, point, absent)
        elif trigger.holders(at, hold.processes):  # all that held for it are gone
            trigger.go_in_vain(at)
        for name in there.values():
            self._release(trigger, name)

    def _may_stop_waiting(self, trigger: Trigger, hold: Hold, absent: Iterable[str]) -> bool:
        """Whether to stop waiting for the absent processes. A fault that acts outside ranks does
        not wait for processes that the kernel shows as stopped: they may arrive long after the
        step.
        """
        if hold.is_long_enough(self._scene.now_ns()):
            return True
        stopped = all(self._scene.os_state(name) in STOPPED for name in absent)
        return trigger.held_by_all and stopped

    def _is_there(self, rank: int, process: str) -> bool:
        """Whether the process still has the rank and is alive; its exit may not have been noticed
        yet.
        """
        return self._scene.process_of(rank) == process and self._scene.os_state(process) not in DEAD

    def _fire_held(
        self, trigger: Trigger, held: Mapping[int, str], point: Point
    ) -> Collection[int]:
        """Act on the ranks that hold. Returns the ranks whose agents were commanded to act; those
        must not be released.
        """
        planned = trigger.planned
        first = trigger.fire_on(point, held)
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
        """Act outside the ranks while all ranks hold except the ``absent`` ones."""
        planned = trigger.planned
        if not self._acts.reachable(planned, trigger.fault):
            trigger.not_there(point)
            return
        trigger.fire(point, self._attempt)
        if not self._refused(trigger, planned, point[0]):
            at = trigger.acts_at(point)
            self._fire_outside(trigger, planned, at, point=point, absent=absent)

    def _release(self, trigger: Trigger, process: str) -> None:
        self._scene.send(process, Extra(topic="go", payload={"act": False, "fault": trigger.id}))

    def _again(self, live: LiveOccurrence, why: str) -> None:
        """The occurrence never acted, because its target had left the point or died: void it, and
        make its trigger pending again.
        """
        self._struck.void(live, why)
        trigger = self._triggers[live.planned.id]
        trigger.again(live.act.point, live.occurrence.rank or 0, live.act.number)

    # ---- triggers that no rank holds for

    def _fire_at_last(self, trigger: Trigger, point: Point) -> None:
        """Fire at a step that no rank holds for, or that no rank arrived at, and record how late
        the act is.
        """
        steps, why = self._committed + 1 - point[0], POLLED
        if trigger.held_by_all:
            why = LET_GO if trigger.was_let_go(point) else NOT_HELD
            why = NOT_THERE if trigger.was_not_there(point) else why
            is_held = trigger.acts_at(point) in trigger.holds
            # A save belongs to the step before it, so only the following step shows that ranks have
            # passed the point.
            if trigger.has_fired(point) or (why != NOT_THERE and (steps < 2 or is_held)):
                return
        self._fire_once(trigger, point, LateAct(steps=steps, why=why) if steps > 0 else None)

    def _fire_once(self, trigger: Trigger, point: Point, late: LateAct | None = None) -> None:
        """Fire, unless it has fired in this attempt already or a target is missing."""
        planned = trigger.planned.aimed(point)
        if trigger.fired_in(point, self._attempt):
            return
        if not self._acts.reachable(planned, trigger.fault):
            trigger.not_there(point)
            return
        trigger.fire(point, self._attempt)
        self._fire_unheld(trigger, planned, late)

    def _fire_unheld(
        self, trigger: Trigger, planned: PlannedFault, late: LateAct | None = None
    ) -> None:
        """Fire at targets that do not hold."""
        if self._refused(trigger, planned, None):
            return
        if trigger.fault.where is not Where.RANK:
            self._fire_outside(trigger, planned, None, late=late)
            return
        act = self._struck.next_number(planned)
        for rank in planned.ranks:
            # Only the rank's training thread can act, at its next step: arm the process that has
            # the rank to hold there.
            trigger.wait_for_next_step((rank,), act)
            process = self._scene.process_of(rank)
            if process:
                self.arm(process, rank)

    def _refused(self, trigger: Trigger, planned: PlannedFault, step: int | None) -> bool:
        """Whether the blast radius forbids an occurrence that is due. A refused occurrence is
        recorded as failed.
        """
        reason = self._guard.refusal(planned, trigger.fault, self._struck.live)
        if reason is not None:
            self._struck.not_fired(planned, step, reason)
        return reason is not None

    # ---- acting

    def _fire_in_ranks(
        self, trigger: Trigger, held: Mapping[int, str], at: Point, point: Point | None
    ) -> None:
        """Make the agents in the ranks act. ``at``: where they hold; ``point``: the planned point,
        None if no step was named.
        """
        if not trigger.fault.everywhere:
            act = self._act(trigger, trigger.planned, at, held, point=point, held=True)
            self._acts.in_ranks(act, held)
            return
        act = self._act(trigger, trigger.planned, at, ())
        trigger.take_next_step(trigger.planned.ranks)
        self._acts.everywhere(act, held)
        self._arm_all(but=held)

    def _fire_outside(
        self, trigger: Trigger, planned: PlannedFault, at: Point | None, **more: Unpack[_More]
    ) -> None:
        """Act from outside on every target. If the act ends at a step, arm all ranks to hold for
        its end before they continue. ``planned``: limited to the targets that it hits; ``more``: as
        in Act.
        """
        if self._acts.from_outside(self._act(trigger, planned, at, planned.ranks, **more)):
            self._arm_all()

    def _act(
        self,
        trigger: Trigger,
        planned: PlannedFault,
        at: Point | None,
        ranks: Iterable[int],
        **more: Unpack[_More],
    ) -> Act:
        """The act that is due now. ``ranks``: the ranks it hits that may have waited for it."""
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
