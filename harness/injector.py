"""Plays the planned faults of one arm: arms ranks, acts when a point is reached, gathers evidence, heals.

For every occurrence: undo record on disk, ``fault_injected``, the act, ``fault_landed`` once somebody else
saw it (or ``fault_failed``), ``fault_healed``. What a fault acts on is found by ``harness.sites``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from chaos.clocks import Clocks
from chaos.events import Event, Kind, Tail
from chaos.fault import Fault, Landed, Need, Occurrence, Where
from chaos.schedule import NO_POINT, PlannedFault, Point, due_by_event, due_by_step, due_by_time
from chaos.verify import unmet
from harness.guard import Guard
from harness.scene import Scene
from harness.sites import Aim, Miss, Site, site
from harness.sites.process import miss_rank
from harness.struck import Live, announcement, command_of, spoken_of, to_hold_at, undone, widened
from recovery.wire import Extra

EVIDENCE_LIMIT_S = 15.0
UNSEEN = "it was over before anybody saw an effect: too weak to be felt, or nothing was there to be hit"


class Injector:
    """Faults of one arm. ``plan`` is empty in a control arm."""

    def __init__(
        self, scene: Scene, plan: tuple[PlannedFault, ...], kinds: Mapping[str, type[Fault]]
    ) -> None:
        self._scene = scene
        if any(kinds[planned.kind].everywhere for planned in plan):
            plan = widened(plan, kinds, scene.setup.cell.scenario.workload.ranks)
        self._standing: list[dict[str, Any]] = []  # commands that hold for whoever joins, too
        self._plan = {planned.id: planned for planned in plan}
        self._faults = {planned.id: kinds[planned.kind](**planned.params) for planned in plan}
        self._all = plan
        self._sites: dict[Where, Site] = {}
        self._guard = Guard(scene)
        # by (fault, point), and by (fault, point, rank) where ranks hold for it
        self._fired: Counter[Any] = Counter()
        self._numbers: Counter[str] = Counter()
        self._live: list[Live] = []
        self._clocks = Clocks()
        self._events_seen: Counter[str] = Counter()
        self._training_since_ns: int | None = None
        self._waiting: set[tuple[str, int]] = set()  # (fault, rank): due, but no step was named
        self._holding: dict[tuple[str, Point], dict[int, str]] = {}  # ranks that hold for a fault, and who
        self._attempt = 0
        self._committed = 0
        self._attempt_of: dict[tuple[str, Point], int] = {}  # in which a trigger of ``tick`` fired last

    def announce(self) -> None:
        """Record what is planned, targets resolved."""
        for planned in self._plan.values():
            points = [self._point(planned, point) for point in planned.points]
            self._scene.record(Kind.FAULT_PLANNED, **announcement(planned, self._faults[planned.id], points))

    # ---- triggers

    def arm(self, process: str, rank: int) -> None:
        """Tell a process that is about to take ``rank`` where it has to hold."""
        points = to_hold_at(self._all, self._faults, rank, self._fired, self._waiting)
        for held in self._holding.values():
            held.pop(rank, None)  # whoever held there has left
        if self._plan:
            self._scene.send(
                process, Extra(topic="arm", payload={"points": points, "standing": self._standing})
            )

    def on_said(self, process: str, rank: int | None, message: Extra) -> None:
        """A rank reached an armed point, or ended a lasting fault."""
        if message.topic == "at_point":
            planned = self._plan[message.payload["fault"]]
            self._on_hold(planned, process, rank, message.payload["step"], message.payload["phase"])
        elif live := spoken_of(self._live, message):
            if message.topic == "healed":
                self._heal(live, "ended by the rank's agent when its duration was over")
            elif message.topic == "missed" and not live.settled:
                self._missed(live, process)

    def _missed(self, live: Live, process: str) -> None:
        """The word to act came when the rank had left the point: the occurrence is void, and it is armed again."""
        fault, rank = live.planned.id, live.occurrence.rank or 0
        self._fail(live, "the rank had left the point: armed again", again=True)
        live.healed = True
        point = next((p for p in live.planned.points if p[0] == live.occurrence.step), None)
        if point is None:
            self._waiting.add((fault, rank))
        else:
            self._fired[fault, point, rank] -= 1
        self.arm(process, rank)

    def _on_hold(self, planned: PlannedFault, process: str, rank: int | None, step: int, phase: str) -> None:
        if rank is not None and (planned.id, rank) in self._waiting:
            self._waiting.discard((planned.id, rank))
            self._fire_in_ranks(planned, {rank: process}, step)
            return
        point = next((p for p in planned.points if self._point(planned, p) == (step, phase)), None)
        if point is None or rank is None or self._fired[planned.id, point, rank] >= planned.max_fires:
            self._release(process)
            return
        self._holding.setdefault((planned.id, point), {})[rank] = process
        self._fire_if_all_hold(planned, point)

    def _fire_if_all_hold(self, planned: PlannedFault, point: Point) -> None:
        """One act for all the ranks a fault hits, as soon as each of them that lives holds at the point."""
        held = self._holding.get((planned.id, point), {})
        for rank in planned.ranks:
            may = self._fired[planned.id, point, rank] < planned.max_fires
            if may and rank not in held and self._scene.process_of(rank):
                return
        if not held:
            return
        del self._holding[planned.id, point]
        spares = planned.spares if not any(self._fired[planned.id, point, r] for r in planned.ranks) else ()
        for rank in held:
            self._fired[planned.id, point, rank] += 1
        if self._refused(planned, point[0]):
            for process in held.values():
                self._release(process)
            return
        if self._faults[planned.id].where is Where.RANK:
            self._fire_in_ranks(planned, held, point[0])
            return
        ranks = tuple(sorted(held))
        self._fire_outside(dataclasses.replace(planned, ranks=ranks, spares=spares), step=point[0])
        for process in held.values():
            self._release(process)

    def _release(self, process: str) -> None:
        self._scene.send(process, Extra(topic="go", payload={"act": False}))

    def on_training(self) -> None:
        """A generation trains. Time triggers count from the first; each may fire once in each."""
        self._attempt += 1
        self._guard.on_training()
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
        """Triggers that no rank holds for (time; steps of spares and checkpoints), evidence, ends of lasting faults."""
        now = self._scene.now_ns()
        self._committed = committed
        if self._training_since_ns is not None:
            seconds = (now - self._training_since_ns) / 1e9
            due = (
                *due_by_time(self._all, seconds, self._fired),
                *due_by_step(self._all, committed, self._fired),
            )
            for planned in due:
                for point in planned.points:
                    self._fire_once(planned.aimed(point), point)
        for fault, point in list(self._holding):
            self._fire_if_all_hold(self._plan[fault], point)  # one that was waited for may have died
        for live in self._live:
            if not live.settled:
                self._look_for_evidence(live, now)
            over = live.until_ns is not None and now >= live.until_ns
            if not live.healed and (over or (live.until_step is not None and committed >= live.until_step)):
                self._heal(live, "its duration was over")

    def observe(self, event: Event) -> None:
        """An event of the orchestrator: possible evidence, and what it says of the clocks of the others."""
        self._clocks.observe(event)
        for live in self._live:
            if not live.settled:
                live.seen.append(event)
            ended = event.kind is Kind.PROCESS_EXITED and live.occurrence.processes == (
                event.data["process"],
            )
            if ended and live.lasts and live.fault.where is Where.RANK and not live.healed:
                self._heal(live, "ended with the process it acted in")

    def pending(self) -> bool:
        """Whether evidence is still looked for."""
        return any(not live.settled for live in self._live)

    def close(self) -> None:
        """Heal everything, on every way out; what found no evidence by now did not land."""
        now = self._scene.now_ns()
        for live in self._live:
            if not live.settled:
                self._look_for_evidence(live, now)
        for live in self._live:
            if not live.settled:
                self._fail(live, UNSEEN if live.healed else "the run ended before anybody saw an effect")
            if not live.healed:
                self._heal(live, "the run ended")

    # ---- firing

    def _point(self, planned: PlannedFault, point: Point) -> Point:
        return point[0], self._faults[planned.id].point(point[1])

    def _site(self, where: Where) -> Site:
        if where not in self._sites:
            self._sites[where] = site(where, self._scene)
        return self._sites[where]

    def _fire_once(self, planned: PlannedFault, point: Point) -> None:
        """Fire, if it has not yet in this attempt and somebody is there to be hit."""
        if self._attempt_of.get((planned.id, point)) != self._attempt and self._reachable(planned):
            self._attempt_of[planned.id, point] = self._attempt
            self._fired[planned.id, point] += 1
            self._fire_unheld(planned)

    def _reachable(self, planned: PlannedFault) -> bool:
        where = self._faults[planned.id].where
        if where is Where.RANK:
            return all(self._scene.process_of(rank) for rank in planned.ranks)
        return self._site(where).reachable(planned)

    def _fire_unheld(self, planned: PlannedFault) -> None:
        """Fire at targets none of which holds."""
        if self._refused(planned, None):
            return
        if self._faults[planned.id].where is not Where.RANK:
            self._fire_outside(planned, step=None)
            return
        for rank in planned.ranks:
            # Only its training thread can act, at the next step: whoever holds the rank is told to hold there.
            self._waiting.add((planned.id, rank))
            process = self._scene.process_of(rank)
            if process:
                self.arm(process, rank)

    def _fire_in_ranks(self, planned: PlannedFault, held: Mapping[int, str], step: int) -> None:
        """Have the agents in the ranks act, if the fault is theirs to do; else act on them from outside."""
        if self._faults[planned.id].where is not Where.RANK:
            self._fire_outside(dataclasses.replace(planned, ranks=tuple(held), spares=()), step=step)
            for process in held.values():
                self._release(process)
            return
        if self._faults[planned.id].everywhere:
            self._fire_everywhere(planned, held, step)
            return
        for rank, process in sorted(held.items()):
            who = {"process": process, "rank": rank}
            groups = self._scene.groups if Need.CGROUP in self._faults[planned.id].wants() else None
            undo = groups.undo(process) if groups is not None else ()
            aim = Aim(target=None, who=who, processes=(process,), rank=rank, undo=undo)
            command = command_of(planned, self._begin(planned, aim, step), step)
            self._scene.send(process, Extra(topic="go", payload=command))

    def _fire_everywhere(self, planned: PlannedFault, held: Mapping[int, str], step: int) -> None:
        """One occurrence in all ranks; those that do not hold hear of it when they are armed anew."""
        names = tuple(process for _, process in sorted(held.items()))
        aim = Aim(target=None, who={"processes": list(names), "everywhere": True}, processes=names)
        command = command_of(planned, self._begin(planned, aim, step), step)
        self._standing.append(command)
        self._waiting -= {(planned.id, rank) for rank in planned.ranks}
        for process in names:
            self._scene.send(process, Extra(topic="go", payload=command))
        for rank in planned.ranks:
            other = self._scene.process_of(rank)
            if rank not in held and other:
                self.arm(other, rank)

    def _refused(self, planned: PlannedFault, step: int | None) -> bool:
        """Whether the blast radius forbids an occurrence that is due; it is then recorded as failed."""
        reason = self._guard.refusal(planned, self._faults[planned.id], self._live)
        if reason is None:
            return False
        number = self._numbers[planned.id]
        self._numbers[planned.id] += 1
        self._scene.record(
            Kind.FAULT_FAILED, step=step, fault=planned.id, occurrence=number, reason=f"not fired: {reason}"
        )
        return True

    def _fire_outside(self, planned: PlannedFault, step: int | None) -> None:
        fault = self._faults[planned.id]
        aims = self._site(fault.where).aims(planned, fault, self._numbers[planned.id])
        for aim in aims or [miss_rank(-1)]:
            live = self._begin(planned, aim, step)
            if isinstance(aim, Miss):
                self._fail(live, aim.reason)
                continue
            try:
                done = dict(fault.act(aim.target))
            except Exception as error:
                self._fail(live, f"it could not act: {type(error).__name__}: {error}")
                continue
            if done:
                self._effect(live, done)
            # At once: whoever hears of it next may kill the process.
            self._look_for_evidence(live, self._scene.now_ns())

    def _begin(self, planned: PlannedFault, aim: Aim | Miss, step: int | None) -> Live:
        number = self._numbers[planned.id]
        self._numbers[planned.id] += 1
        now = self._scene.now_ns()
        fault, duration, steps = self._faults[planned.id], planned.duration_s, planned.duration_steps
        hit = aim if isinstance(aim, Aim) else None
        step = hit.step if hit and hit.step is not None else step
        processes = hit.processes if hit else ()
        occurrence = Occurrence(
            fault=planned.id, number=number, step=step, time_ns=now, target=dict(aim.who), processes=processes,
            process=processes[0] if processes else None, rank=hit.rank if hit else None,
            checkpoint=hit.checkpoint if hit else None,
        )  # fmt: skip
        outside = fault.where is not Where.RANK
        live = Live(
            planned=planned, fault=fault, occurrence=occurrence, aim=hit, tails=self._tails(processes),
            until_ns=now + int(duration * 1e9) if duration is not None and outside else None,
            until_step=self._committed + steps if steps is not None and outside else None,
        )  # fmt: skip
        about = {"arm": self._scene.setup.id, "fault": planned.id, "occurrence": number, "kind": planned.kind}
        self._scene.ledger.write(**about, target=dict(aim.who), durable=False)
        live.records = [self._scene.ledger.will(undo, **about) for undo in (hit.undo if hit else ())]
        self._live.append(live)
        self._scene.record(
            Kind.FAULT_INJECTED, step=step, fault=planned.id, kind=planned.kind, occurrence=number,
            target=dict(aim.who),
        )  # fmt: skip
        return live

    def _tails(self, processes: Sequence[str]) -> list[Tail]:
        events = self._scene.setup.run.events(self._scene.setup.id)
        return [Tail(events / f"{process}.jsonl") for process in processes]

    # ---- evidence and healing

    def _look_for_evidence(self, live: Live, now: int) -> None:
        if live.aim is not None and live.aim.look is not None and not live.looked:
            seen = live.aim.look()
            if seen is not None:
                live.looked = True
                self._effect(live, seen)
        for tail in live.tails:
            live.seen.extend(self._clocks.corrected(event) for event in tail.read())
        landed = live.fault.landed(live.occurrence, live.seen)
        if landed is not None:
            live.settled = True
            if reason := unmet(live.planned.verify, landed.evidence):
                self._fail(live, f"it landed, but not as verify asks: {reason}")
            else:
                self._landed(live, landed)
            if not live.lasts and not live.healed and live.fault.may_last:
                self._healed(live, "over when done")  # without a duration, until whoever finds it ends it
            elif not live.lasts and not live.healed:
                self._heal(live, "over when done")
        elif now - live.occurrence.time_ns > EVIDENCE_LIMIT_S * 1e9:
            self._fail(live, f"no evidence within {EVIDENCE_LIMIT_S:.0f} s")

    def _landed(self, live: Live, landed: Landed) -> None:
        self._scene.record(
            Kind.FAULT_LANDED, step=live.occurrence.step, witness=landed.witness, evidence=dict(landed.evidence),
            fault=live.occurrence.fault, occurrence=live.occurrence.number,
        )  # fmt: skip

    def _effect(self, live: Live, evidence: Mapping[str, Any]) -> None:
        self._scene.record(
            Kind.FAULT_EFFECT, fault=live.occurrence.fault, occurrence=live.occurrence.number,
            evidence=dict(evidence),
        )  # fmt: skip

    def _fail(self, live: Live, reason: str, **more: bool) -> None:
        """It did not land. One that never acted has nothing to heal."""
        live.settled = True
        live.healed = live.healed or live.aim is None
        self._scene.record(
            Kind.FAULT_FAILED, fault=live.occurrence.fault, occurrence=live.occurrence.number, reason=reason, **more
        )  # fmt: skip

    def _heal(self, live: Live, how: str) -> None:
        remark = undone(live)
        if remark is None:
            return
        for record in live.records:
            self._scene.ledger.undone(record, how + remark)
        self._healed(live, how + remark)

    def _healed(self, live: Live, how: str) -> None:
        if not live.healed:
            live.healed = True
            self._scene.record(
                Kind.FAULT_HEALED, fault=live.occurrence.fault, occurrence=live.occurrence.number, how=how
            )
