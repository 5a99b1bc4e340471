"""Plays the planned faults of one arm: arms ranks, acts when a point is reached, gathers evidence, heals.

For every occurrence: undo record on disk, ``fault_injected``, the act, ``fault_landed`` once somebody else
saw it (or ``fault_failed``), ``fault_healed``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos.events import Event, Kind, Tail
from chaos.fault import Fault, Occurrence, Where
from chaos.schedule import (
    DEFAULT_PHASE,
    NEXT_STEP,
    NO_POINT,
    PlannedFault,
    Point,
    due_by_event,
    due_by_step,
    due_by_time,
)
from harness.scene import CheckpointHandle, ProcessHandle, Scene
from recovery import checkpoints
from recovery.wire import Extra

EVIDENCE_LIMIT_S = 15.0


@dataclass(kw_only=True)
class _Live:
    """An occurrence between injection and heal."""

    planned: PlannedFault
    fault: Fault
    occurrence: Occurrence
    until_ns: int | None
    tail: Tail | None
    seen: list[Event] = field(default_factory=list)
    settled: bool = False
    healed: bool = False
    state_seen: bool = False


def _first_phase(fault: Fault) -> str:
    """The first phase of a step in which a fault can act."""
    return fault.phases[0] if fault.phases and DEFAULT_PHASE not in fault.phases else DEFAULT_PHASE


class Injector:
    """Faults of one arm. ``plan`` is empty in a control arm."""

    def __init__(
        self, scene: Scene, plan: tuple[PlannedFault, ...], kinds: Mapping[str, type[Fault]]
    ) -> None:
        self._scene = scene
        self._plan = {planned.id: planned for planned in plan}
        self._faults = {planned.id: kinds[planned.kind](**planned.params) for planned in plan}
        self._all = plan
        self._fired: Counter[Any] = (
            Counter()
        )  # by (fault, point), and by (fault, point, rank) where ranks hold for it
        self._numbers: Counter[str] = Counter()
        self._live: list[_Live] = []
        self._events_seen: Counter[str] = Counter()
        self._training_since_ns: int | None = None
        self._waiting: set[tuple[str, int]] = set()  # (fault, rank): due, but no step was named
        self._attempt = 0
        self._attempt_of: dict[tuple[str, Point], int] = {}  # in which a trigger of ``tick`` fired last

    def announce(self) -> None:
        """Record what is planned, targets resolved."""
        for planned in self._plan.values():
            at = {
                "points": [list(self._point(planned, point)) for point in planned.points], "time_s": planned.time_s,
                "event": planned.event, "nth": planned.nth,
            }  # fmt: skip
            target = {"ranks": planned.ranks, "spares": planned.spares, "checkpoint": planned.checkpoint}
            self._scene.record(Kind.FAULT_PLANNED, fault=planned.id, kind=planned.kind, target=target, at=at)

    # ---- triggers

    def arm(self, process: str, rank: int) -> None:
        """Tell a process that is about to take ``rank`` where it has to hold."""
        points = [
            {
                "fault": planned.id,
                "step": point[0],
                "phase": self._point(planned, point)[1],
                "seed": planned.seed,
            }
            for planned in self._plan.values()
            if rank in planned.ranks
            for point in planned.points
            if self._fired[planned.id, point, rank] < planned.max_fires
        ]
        for planned in self._plan.values():
            if (planned.id, rank) in self._waiting:
                phase = self._faults[planned.id].point(_first_phase(self._faults[planned.id]))
                points.append({"fault": planned.id, "step": NEXT_STEP, "phase": phase, "seed": planned.seed})
        if self._plan:
            self._scene.send(process, Extra(topic="arm", payload={"points": points}))

    def on_said(self, process: str, rank: int | None, message: Extra) -> None:
        """A rank reached an armed point, or ended a lasting fault."""
        if message.topic == "at_point":
            planned = self._plan[message.payload["fault"]]
            step, phase = message.payload["step"], message.payload["phase"]
            if rank is not None and self._may_act(planned, rank, step, phase):
                self._fire(planned, process=process, rank=rank, step=step)
            else:
                self._scene.send(process, Extra(topic="go", payload={"act": False}))
        elif message.topic == "healed":
            for live in self._live:
                key = (message.payload["fault"], message.payload["occurrence"])
                if key == (live.occurrence.fault, live.occurrence.number):
                    self._healed(live, "ended by the rank's agent when its duration was over")

    def _may_act(self, planned: PlannedFault, rank: int, step: int, phase: str) -> bool:
        """Whether the fault is due on a rank that holds at this point; counts it if so."""
        if (planned.id, rank) in self._waiting:
            self._waiting.discard((planned.id, rank))
            return True
        point = next((p for p in planned.points if self._point(planned, p) == (step, phase)), None)
        if point is None or self._fired[planned.id, point, rank] >= planned.max_fires:
            return False
        self._fired[planned.id, point, rank] += 1
        return True

    def on_training(self) -> None:
        """A generation trains. Time triggers count from the first; each may fire once in each."""
        self._attempt += 1
        if self._training_since_ns is None:
            self._training_since_ns = self._scene.now_ns()

    def on_event(self, name: str) -> None:
        """Something a fault may wait for happened (checkpoint_committed, recovery_started, ...)."""
        self._events_seen[name] += 1
        for planned in due_by_event(self._all, name, self._events_seen[name], self._fired):
            self._fired[planned.id, NO_POINT] += 1
            self._fire_at_targets(planned)

    def tick(self, committed: int) -> None:
        """Triggers that no rank holds for (time; steps of spares and checkpoints), evidence, ends of lasting faults."""
        now = self._scene.now_ns()
        if self._training_since_ns is not None:
            seconds = (now - self._training_since_ns) / 1e9
            for planned in due_by_time(self._all, seconds, self._fired):
                self._fire_once(planned, NO_POINT)
            for planned in due_by_step(self._all, committed, self._fired):
                for point in planned.points:
                    self._fire_once(planned, point)
        for live in self._live:
            if not live.settled:
                self._look_for_evidence(live, now)
            if not live.healed and live.until_ns is not None and now >= live.until_ns:
                self._heal(live, "its duration was over")

    def observe(self, event: Event) -> None:
        """An event of the orchestrator: possible evidence."""
        for live in self._live:
            if not live.settled:
                live.seen.append(event)

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
                live.settled = True
                self._scene.record(
                    Kind.FAULT_FAILED, fault=live.occurrence.fault, occurrence=live.occurrence.number,
                    reason="the run ended before anybody saw an effect",
                )  # fmt: skip
            if not live.healed:
                self._heal(live, "the run ended")

    # ---- firing

    def _point(self, planned: PlannedFault, point: tuple[int, str]) -> tuple[int, str]:
        return point[0], self._faults[planned.id].point(point[1])

    def _fire_once(self, planned: PlannedFault, point: Point) -> None:
        """Fire, if it has not yet in this attempt and somebody is there to be hit."""
        if self._attempt_of.get((planned.id, point)) != self._attempt and self._reachable(planned):
            self._attempt_of[planned.id, point] = self._attempt
            self._fired[planned.id, point] += 1
            self._fire_at_targets(planned)

    def _reachable(self, planned: PlannedFault) -> bool:
        """Whether every target is there; in the middle of a recovery one may be about to be replaced."""
        held = all(self._scene.process_of(rank) for rank in planned.ranks)
        return held and all(self._scene.spare(index) for index in planned.spares)

    def _fire_at_targets(self, planned: PlannedFault) -> None:
        if self._faults[planned.id].where is Where.CHECKPOINT:
            self._fire_at_checkpoint(planned)
            return
        for rank in planned.ranks:
            process = self._scene.process_of(rank)
            if self._faults[planned.id].where is Where.RANK:
                # Only its training thread can act, at the next step: whoever holds the rank is told to hold there.
                self._waiting.add((planned.id, rank))
                if process:
                    self.arm(process, rank)
            elif process:
                self._fire(planned, process=process, rank=rank, step=None)
            else:
                self._miss(planned, {"rank": rank}, f"nobody holds rank {rank}")
        for index in planned.spares:
            process = self._scene.spare(index)
            if process:
                self._fire(planned, process=process, rank=None, step=None)
            else:
                self._miss(planned, {"spare": index}, f"no spare {index} waits")

    def _fire(self, planned: PlannedFault, *, process: str, rank: int | None, step: int | None) -> None:
        fault = self._faults[planned.id]
        if fault.where is Where.CHECKPOINT:
            self._scene.send(process, Extra(topic="go", payload={"act": False}))
            self._fire_at_checkpoint(planned)
            return
        path = self._scene.setup.run.events(self._scene.setup.id) / f"{process}.jsonl"
        live = self._begin(
            planned, {"process": process, "rank": rank}, step, Tail(path), process=process, rank=rank
        )
        if fault.where is Where.PROCESS:
            fault.act_on_process(ProcessHandle(self._scene, process))
            # At once: whoever hears of it next may kill the process.
            self._look_for_evidence(live, self._scene.now_ns())
        command = {
            "act": True, "fault": planned.id, "occurrence": live.occurrence.number, "kind": planned.kind,
            "params": planned.params, "duration_s": planned.duration_s, "duration_steps": planned.duration_steps,
        }  # fmt: skip
        self._scene.send(process, Extra(topic="go", payload=command))

    def _fire_at_checkpoint(self, planned: PlannedFault) -> None:
        found = checkpoints.newest_first(self._scene.setup.checkpoints)
        if planned.checkpoint != "latest":
            found = [c for c in found if c.step <= int(planned.checkpoint or 0)]
            found = found if found and found[0].step == planned.checkpoint else []
        if not found:
            self._miss(planned, {"checkpoint": None}, "no such checkpoint")
            return
        name, step = found[0].name, found[0].step
        live = self._begin(planned, {"checkpoint": name}, step, None, checkpoint=name)
        target = CheckpointHandle(found[0], found[1] if len(found) > 1 else None)
        try:
            # Another place each time: the same bit flipped twice is as good as new.
            done = dict(live.fault.act_on_checkpoint(target, planned.seed + live.occurrence.number))
        except Exception as error:
            self._failed(live, f"it could not act: {type(error).__name__}: {error}")
            return
        # The recovery stack's own verifier, which the fault does not know, is the witness.
        self._effect(live, done | {"verifier": target.verify()})

    def _miss(self, planned: PlannedFault, target: dict[str, Any], reason: str) -> None:
        """Fire at a target that is not there."""
        self._failed(self._begin(planned, target, None, None), reason)

    def _failed(self, live: _Live, reason: str) -> None:
        live.settled = live.healed = True
        self._scene.record(
            Kind.FAULT_FAILED, fault=live.occurrence.fault, occurrence=live.occurrence.number, reason=reason
        )

    def _begin(
        self, planned: PlannedFault, target: dict[str, Any], step: int | None, tail: Tail | None, **who: Any
    ) -> _Live:
        number = self._numbers[planned.id]
        self._numbers[planned.id] += 1
        now = self._scene.now_ns()
        duration = planned.duration_s
        occurrence = Occurrence(fault=planned.id, number=number, step=step, time_ns=now, **who)
        fault = self._faults[planned.id]
        outside = fault.where is Where.PROCESS
        live = _Live(
            planned=planned, fault=fault, occurrence=occurrence, tail=tail,
            until_ns=now + int(duration * 1e9) if duration is not None and outside else None,
        )  # fmt: skip
        self._scene.ledger(
            arm=self._scene.setup.id, fault=planned.id, occurrence=number, kind=planned.kind, target=target,
            undo=type(fault).heal_process.__doc__ if outside else "ends with the process or the run",
        )  # fmt: skip
        self._live.append(live)
        self._scene.record(
            Kind.FAULT_INJECTED,
            step=step,
            fault=planned.id,
            kind=planned.kind,
            occurrence=number,
            target=target,
        )
        return live

    # ---- evidence and healing

    def _look_for_evidence(self, live: _Live, now: int) -> None:
        if live.fault.where is Where.PROCESS and not live.state_seen and live.occurrence.process:
            state = self._scene.os_state(live.occurrence.process)
            if state in ("T", "t"):
                live.state_seen = True
                self._effect(live, {"os_state": state})
        if live.tail is not None:
            live.seen.extend(live.tail.read())
        landed = live.fault.landed(live.occurrence, live.seen)
        names: dict[str, Any] = {"fault": live.occurrence.fault, "occurrence": live.occurrence.number}
        if landed is not None:
            live.settled = True
            self._scene.record(
                Kind.FAULT_LANDED,
                step=live.occurrence.step,
                witness=landed.witness,
                evidence=dict(landed.evidence),
                **names,
            )
            if not live.fault.lasting and live.until_ns is None and not live.healed:
                self._heal(live, "over when done")
        elif now - live.occurrence.time_ns > EVIDENCE_LIMIT_S * 1e9:
            live.settled = True
            self._scene.record(
                Kind.FAULT_FAILED, reason=f"no evidence within {EVIDENCE_LIMIT_S:.0f} s", **names
            )

    def _effect(self, live: _Live, evidence: dict[str, Any]) -> None:
        self._scene.record(
            Kind.FAULT_EFFECT,
            fault=live.occurrence.fault,
            occurrence=live.occurrence.number,
            evidence=evidence,
        )

    def _heal(self, live: _Live, how: str) -> None:
        process = live.occurrence.process
        if (
            live.fault.where is Where.PROCESS
            and process
            and (live.until_ns is not None or how == "the run ended")
        ):
            live.fault.heal_process(ProcessHandle(self._scene, process))
        self._healed(live, how)

    def _healed(self, live: _Live, how: str) -> None:
        if not live.healed:
            live.healed = True
            self._scene.record(
                Kind.FAULT_HEALED, fault=live.occurrence.fault, occurrence=live.occurrence.number, how=how
            )
