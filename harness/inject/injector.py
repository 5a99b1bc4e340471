"""Plays the planned faults of one arm: arms ranks, and acts when a point is reached, a time or an
event has come.

For every occurrence: undo record on disk, ``fault_injected``, the act, ``fault_landed`` once
somebody else saw it (or ``fault_failed``), ``fault_healed`` (``harness.inject.occurrences``). What
a fault acts on is found by ``harness.inject.sites``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from chaos.events.log import Event, Kind
from chaos.fault.base import Fault, Where
from chaos.schedule.plan import (
    NO_POINT,
    PlannedFault,
    Point,
    due_by_event,
    due_by_step,
    due_by_time,
)
from harness.arm.fault_context import Scene
from harness.inject.firing import Firing
from harness.inject.holds import Holds
from harness.inject.occurrence import (
    LET_GO,
    NOT_HELD,
    NOT_THERE,
    POLLED,
    Late,
    Live,
    announcement,
    held_by_all,
    may_fire,
)
from harness.inject.sites.process import DEAD
from recovery.detection.hangs import STOPPED
from recovery.transport.wire import Extra


class Injector(Firing):
    """Faults of one arm. ``plan`` is empty in a control arm."""

    def __init__(
        self, scene: Scene, plan: tuple[PlannedFault, ...], kinds: Mapping[str, type[Fault]]
    ) -> None:
        super().__init__(scene, plan, kinds)
        self._events_seen: Counter[str] = Counter()
        self._training_since_ns: int | None = None
        self._holds = Holds()
        # due, held for, and what they act on was not there
        self._unreached: set[tuple[str, Point]] = set()
        # due, and the generation was lost whose ranks held for it
        self._let_go: set[tuple[str, Point]] = set()
        self._attempt = 0
        # in which a trigger of ``tick`` fired last
        self._attempt_of: dict[tuple[str, Point], int] = {}

    def announce(self) -> None:
        """Record what is planned, targets resolved."""
        for planned in self._plan.values():
            points = [self._point(planned, point) for point in planned.points]
            self._scene.record(
                Kind.FAULT_PLANNED, **announcement(planned, self._faults[planned.id], points)
            )

    # ---- triggers

    def on_said(self, process: str, rank: int | None, message: Extra) -> None:
        """A rank reached an armed point, left one without an answer, or ended a lasting fault."""
        if message.topic in ("at_point", "unanswered"):
            planned, at = (
                self._plan[message.payload["fault"]],
                (message.payload["step"], message.payload["phase"]),
            )
            if message.topic == "at_point":
                self._on_hold(planned, process, rank, at)
            else:
                self._holds.left((planned.id, at), rank)
                self._struck.not_fired(
                    planned, at[0], f"{process} held for it, and nobody answered"
                )
        elif live := self._struck.spoken_of(message):
            if message.topic == "healed":
                self._struck.heal(live, "ended by the rank's agent when its duration was over")
            elif message.topic == "missed" and not live.settled:
                self._again(live, process, "the rank had left the point: armed again")

    def _again(self, live: Live, process: str | None, why: str) -> None:
        """It never acted, as whoever was to be hit had left the point, or was dead: the occurrence
        is void, and the fault is armed again.
        """
        fault, rank = live.planned.id, live.occurrence.rank or 0
        self._struck.fail(live, why, again=True)
        self._acts[fault, rank] = live.act
        if live.fault.where is Where.RANK:
            live.healed = True
        else:
            self._struck.heal(live, "it never took effect")
        if live.point is None:
            self._waiting.add((fault, rank))
        else:
            self._fired[fault, live.point, rank] -= 1
        if process is not None:
            self.arm(process, rank)

    def _on_hold(self, planned: PlannedFault, process: str, rank: int | None, at: Point) -> None:
        if rank is not None and (planned.id, rank) in self._waiting:
            self._waiting.discard((planned.id, rank))
            self._fire_in_ranks(planned, {rank: process}, at, None)
            return
        if rank is None or rank not in self._holders(planned, at):
            self._release(planned, process)
            return
        self._holds.came((planned.id, at), rank, process, self._scene.now_ns())
        self._fire_if_all_hold(planned, at)

    def _holders(self, planned: PlannedFault, at: Point) -> set[int]:
        """The ranks that hold there, for a beginning or an end."""
        if self._ending(planned, at):
            return set(self._ranks)
        point, fault = self._planned_at(planned, at), self._faults[planned.id]
        if point is None:
            return set()
        return {rank for rank in self._ranks if may_fire(planned, fault, point, rank, self._fired)}

    def _ending(self, planned: PlannedFault, at: Point) -> list[Live]:
        return [
            live
            for live in self._struck.live
            if live.planned.id == planned.id and live.ends_at == at
        ]

    def _planned_at(self, planned: PlannedFault, at: Point) -> Point | None:
        return next((point for point in planned.points if self._point(planned, point) == at), None)

    def _fire_if_all_hold(self, planned: PlannedFault, at: Point) -> None:
        """End what is over there, and one act for all the ranks a fault hits, as soon as each of
        them that lives holds at the point, or has been waited for in vain. Whoever died there is
        left out: the fault is armed again with whoever takes its rank.
        """
        held = self._holds.at((planned.id, at))
        if not held:
            return
        absent = self._awaited(planned, at)
        if absent and not self._in_vain(planned, at, absent):
            return
        self._holds.end([(planned.id, at)])
        for live in self._ending(planned, at):
            self._struck.heal(live, "its duration was over")
        there = {rank: name for rank, name in held.items() if self._is_there(rank, name)}
        point, fault = self._planned_at(planned, at), self._faults[planned.id]
        hit = {
            rank for rank in there if point and may_fire(planned, fault, point, rank, self._fired)
        }
        if point is not None and hit and not held_by_all(planned, fault):
            told = self._fire_held(planned, {rank: there[rank] for rank in sorted(hit)}, point)
            there = {rank: name for rank, name in there.items() if rank not in told}
        elif point is not None and hit:
            self._fire_for_all(planned, point, absent)
        for name in there.values():
            self._release(planned, name)

    def _awaited(self, planned: PlannedFault, at: Point) -> list[str]:
        """Those that live and are still to come to a point where others hold."""
        ranks = self._holders(planned, at) - self._holds.at((planned.id, at)).keys()
        return [name for rank in sorted(ranks) if (name := self._scene.process_of(rank))]

    def _in_vain(self, planned: PlannedFault, at: Point, absent: Iterable[str]) -> bool:
        """Whether nobody waits for these any longer. What acts on no rank is not kept waiting by
        one that the kernel shows as stopped: it may come when the step is long past.
        """
        if self._holds.long_enough((planned.id, at), self._scene.now_ns()):
            return True
        everybody = held_by_all(planned, self._faults[planned.id])
        return everybody and all(self._scene.os_state(name) in STOPPED for name in absent)

    def _is_there(self, rank: int, process: str) -> bool:
        """Whether it still has the rank and lives, though its exit may not have been
        noticed yet.
        """
        return self._scene.process_of(rank) == process and self._scene.os_state(process) not in DEAD

    def _fire_held(
        self, planned: PlannedFault, held: Mapping[int, str], point: Point
    ) -> Iterable[int]:
        """Act on the ranks that hold; returns those whose agents are told to act, which are not to
        be released.
        """
        spares = (
            planned.spares
            if not any(self._fired[planned.id, point, r] for r in planned.ranks)
            else ()
        )
        for rank in held:
            self._fired[planned.id, point, rank] += 1
        if self._refused(planned, point[0]):
            return ()
        at = self._point(planned, point)
        if self._faults[planned.id].where is Where.RANK:
            self._fire_in_ranks(planned, held, at, point)
            return held
        hit = dataclasses.replace(planned, ranks=tuple(held), spares=spares)
        self._fire_outside(hit, at, point=point, held=True)
        return ()

    def _fire_for_all(self, planned: PlannedFault, point: Point, absent: Sequence[str]) -> None:
        """Act on what is no rank's, while all ranks hold but those that are ``absent``."""
        if not self._reachable(planned):
            self._unreached.add((planned.id, point))
            return
        self._fired[planned.id, point] += 1
        self._attempt_of[planned.id, point] = self._attempt
        if not self._refused(planned, point[0]):
            self._fire_outside(planned, self._point(planned, point), point=point, absent=absent)

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
        for planned in due_by_event(self._all, name, self._events_seen[name], self._fired):
            self._fired[planned.id, NO_POINT] += 1
            self._fire_unheld(planned)

    def tick(self, committed: int) -> None:
        """Triggers that no rank holds for (time; steps that nobody held for), evidence, ends of
        lasting faults.
        """
        self._committed = committed
        if self._training_since_ns is not None:
            seconds = (self._scene.now_ns() - self._training_since_ns) / 1e9
            for planned in due_by_time(self._all, seconds, self._fired):
                for point in planned.points:
                    self._fire_once(planned.aimed(point), point)
            for planned in due_by_step(self._all, committed, self._fired):
                for point in planned.points:
                    self._fire_at_last(planned, point)
        for fault, at in self._holds:
            self._fire_if_all_hold(self._plan[fault], at)  # one that was waited for may have died
        self._struck.tick(committed)

    def observe(self, event: Event) -> None:
        """An event of the orchestrator: evidence, an end of those who hold, the death of one that
        was to be hit.
        """
        if event.kind in (Kind.ABORT_SENT, Kind.GENERATION_STARTED):
            self._let_all_go()
        for live in self._struck.observe(event):
            self._again(
                live, None, "its target died where it held, before it took effect: armed again"
            )

    def _let_all_go(self) -> None:
        """Whoever holds leaves its generation, and is armed with the place it takes next, where the
        step may not come again.
        """
        for fault, at in self._holds:
            planned = self._plan[fault]
            point = self._planned_at(planned, at)
            if point is not None and held_by_all(planned, self._faults[fault]):
                self._let_go.add((fault, point))
        self._holds.end(self._holds)

    def pending(self) -> bool:
        """Whether evidence is still looked for."""
        return self._struck.pending()

    def close(self) -> None:
        """Heal everything, on every way out; what found no evidence by now did not land. Say of
        what was due, and never came, that what it acts on was not there (a machine, a spare, a
        coordinator that is not back yet), or that ranks had held for it when they were lost.
        """
        for fault, point in sorted(self._unreached | self._let_go):
            if not self._fired[fault, point]:
                step = point[0] if point in self._plan[fault].points else None
                why = NOT_THERE if (fault, point) in self._unreached else LET_GO
                self._struck.not_fired(self._plan[fault], step, why)
        self._struck.close()

    # ---- firing

    def _fire_at_last(self, planned: PlannedFault, point: Point) -> None:
        """Fire at a step that no rank holds for, or for which none came to hold, and say how late
        it is.
        """
        key, steps = (planned.id, point), self._committed + 1 - point[0]
        why = POLLED
        if held_by_all(planned, self._faults[planned.id]):
            why = LET_GO if key in self._let_go else NOT_HELD
            why = NOT_THERE if key in self._unreached else why
            # A save belongs to the step before it, so that only the next one shows that ranks went
            # past the point.
            if self._fired[key] or (why != NOT_THERE and (steps < 2 or self._is_held_for(key))):
                return
        self._fire_once(
            planned.aimed(point), point, Late(steps=steps, why=why) if steps > 0 else None
        )

    def _is_held_for(self, key: tuple[str, Point]) -> bool:
        return (key[0], self._point(self._plan[key[0]], key[1])) in self._holds

    def _fire_once(self, planned: PlannedFault, point: Point, late: Late | None = None) -> None:
        """Fire, if it has not yet in this attempt and somebody is there to be hit."""
        if self._attempt_of.get((planned.id, point)) == self._attempt:
            return
        if not self._reachable(planned):
            self._unreached.add((planned.id, point))
            return
        self._attempt_of[planned.id, point] = self._attempt
        self._fired[planned.id, point] += 1
        self._fire_unheld(planned, late)
