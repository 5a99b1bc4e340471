"""A fault's act and its occurrences, from injection to heal: their records, evidence and end; and
the ``fault_planned`` record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from trainchaos.chaos.events.clocks import Clocks
from trainchaos.chaos.events.following import Follower, SharedTail
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import LANDED_OTHERWISE, OVER_WHEN_DONE, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.witness import effects_of
from trainchaos.chaos.scenario.verify import unmet
from trainchaos.chaos.schedule.plan import DEFAULT_PHASE, PlannedFault, Point
from trainchaos.chaos.schedule.trigger import Trigger
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import MissingTarget, OccurrenceTarget
from trainchaos.recovery.transport.wire import Extra

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


def spoken_of(struck: Sequence[LiveOccurrence], message: Extra) -> LiveOccurrence | None:
    """The occurrence that a rank's message is about."""
    about = (message.payload.get("fault"), message.payload.get("occurrence"))
    return next(
        (live for live in struck if (live.occurrence.fault, live.occurrence.number) == about), None
    )


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


EVIDENCE_LIMIT_S = 15.0
EVIDENCE_STEPS = 5
"""How many steps the effect of a fault that slows steps may take to show; these steps may take
longer than EVIDENCE_LIMIT_S.
"""
LONGEST_S = 600.0
"""Upper limit of the wait for an effect, however little of it the job trained."""
AT_ONCE = (Where.PROCESS, Where.NODE, Where.COORDINATOR, Where.HEALTH)
"""Faults whose effect shows whatever the job does: to the kernel, or in the coordinator's log. The
effect of all others shows only in what the job does next.
"""
OVERDUE_S = 1.0
NS_PER_S = 1_000_000_000
_BROKEN = (Kind.ABORT_SENT, Kind.GENERATION_STARTED)
ENDED_BEFORE = "its target ended, for another reason, before an effect was seen"
UNSEEN = "it was over before an effect was seen: too mild, or no target present"


class Occurrences:
    """The occurrences of one arm, in order of injection."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.live: list[LiveOccurrence] = []
        self._numbers: Counter[str] = Counter()
        self._files: dict[str, SharedTail] = {}
        self._clocks = Clocks()
        self._trains = False
        self._ticked_ns = 0

    def spoken_of(self, message: Extra) -> LiveOccurrence | None:
        """The occurrence that a rank's message is about."""
        about = (message.payload.get("fault"), message.payload.get("occurrence"))
        return next(
            (o for o in self.live if (o.occurrence.fault, o.occurrence.number) == about), None
        )

    def next_number(self, planned: PlannedFault) -> int:
        """Number of the next occurrence of a fault."""
        return self._numbers[planned.id]

    def ending(self, fault: str, at: Point) -> list[LiveOccurrence]:
        """Occurrences of a fault whose end ranks hold for at this point."""
        return [live for live in self.live if live.planned.id == fault and live.ends_at == at]

    def begin(self, act: Act, aim: OccurrenceTarget | MissingTarget) -> LiveOccurrence:
        """Write the undo records and ``fault_injected``, before the act."""
        hit = aim if isinstance(aim, OccurrenceTarget) else None
        occurrence = self._occurrence(act, aim, hit)
        processes = occurrence.processes
        live = LiveOccurrence(
            act=act,
            occurrence=occurrence,
            aim=hit,
            tails=self._tails(processes),
            heard=set(processes),
        )
        about = {
            "arm": self._scene.setup.id,
            "fault": occurrence.fault,
            "occurrence": occurrence.number,
            "kind": act.planned.kind,
        }
        self._scene.ledger.write(**about, target=dict(aim.who), durable=False)
        live.records = [
            self._scene.ledger.will(undo, **about) for undo in (hit.undo if hit else ())
        ]
        self.live.append(live)
        self._record_injected(live)
        return live

    def _occurrence(
        self, act: Act, aim: OccurrenceTarget | MissingTarget, hit: OccurrenceTarget | None
    ) -> Occurrence:
        """The next occurrence of the fault. ``hit``: ``aim``, if the target is there."""
        step = act.at[0] if act.at else None
        processes = hit.processes if hit else ()
        return Occurrence(
            fault=act.planned.id,
            number=self._take_number(act.planned),
            step=hit.step if hit and hit.step is not None else step,
            time_ns=self._scene.now_ns(),
            target=dict(aim.who),
            processes=processes,
            process=processes[0] if processes else None,
            rank=hit.rank if hit else None,
            checkpoint=hit.checkpoint if hit else None,
        )

    def _record_injected(self, live: LiveOccurrence) -> None:
        act, occurrence = live.act, live.occurrence
        when: dict[str, Any] = {} if act.at is None else {"phase": act.at[1]}
        if act.absent:
            when["absent"] = list(act.absent)
        self._scene.record(
            Kind.FAULT_INJECTED,
            step=occurrence.step,
            fault=occurrence.fault,
            kind=act.planned.kind,
            occurrence=occurrence.number,
            target=dict(occurrence.target),
            act=act.number,
            **when,
            **(act.late.recorded() if act.late else {}),
        )

    def _take_number(self, planned: PlannedFault) -> int:
        number = self._numbers[planned.id]
        self._numbers[planned.id] += 1
        return number

    def not_fired(self, planned: PlannedFault, step: int | None, reason: str) -> None:
        """Record an occurrence that was due and did not start."""
        self._scene.record(
            Kind.FAULT_FAILED,
            step=step,
            fault=planned.id,
            occurrence=self._take_number(planned),
            reason=f"not fired: {reason}",
        )

    def fail(self, live: LiveOccurrence, reason: str, **more: bool) -> None:
        """Record that it did not land. Without a target there is nothing to heal."""
        live.settled = True
        live.healed = live.healed or live.aim is None
        self._scene.record(
            Kind.FAULT_FAILED,
            fault=live.occurrence.fault,
            occurrence=live.occurrence.number,
            reason=reason,
            **more,
        )

    def void(self, live: LiveOccurrence, why: str) -> None:
        """It never acted; its trigger will fire again in its place."""
        self.fail(live, why, again=True)
        if live.fault.where is Where.RANK:
            live.healed = True
        else:
            self.heal(live, "it never took effect")

    def effect(self, live: LiveOccurrence, evidence: Mapping[str, Any]) -> None:
        """Record what the act did, or what was observed of it."""
        self._scene.record(
            Kind.FAULT_EFFECT,
            fault=live.occurrence.fault,
            occurrence=live.occurrence.number,
            evidence=dict(evidence),
        )

    def heal(self, live: LiveOccurrence, how: str) -> None:
        """Undo it, unless it is undone already; an act that cannot be undone stays open. Effects
        that other occurrences have on the same target remain (``harness.arm.in_force``).
        """
        if live.healed:
            return
        begun_ns = self._scene.now_ns()
        remark = undone(live)
        if remark is None:
            return
        if (after := self._still_on(live)) is not None:
            remark += f"; its effect is left to occurrence {after.occurrence.number}"
        for record in live.records:
            self._scene.ledger.undone(record, how + remark)
        self._healed(live, how + remark, begun_ns=begun_ns)

    def _still_on(self, live: LiveOccurrence) -> LiveOccurrence | None:
        """Another occurrence of the same fault that acts on the same target from outside and is not
        over.
        """
        if not live.lasts or live.fault.where is Where.RANK:
            return None  # a rank's agent keeps its occurrences apart
        same = (one for one in self.live if one.planned.id == live.planned.id and one is not live)
        return next(
            (
                o
                for o in same
                if o.aim and not o.healed and o.occurrence.target == live.occurrence.target
            ),
            None,
        )

    # ---- evidence

    def look(self, live: LiveOccurrence, committed: int | None = None) -> None:
        """Look for evidence for at most EVIDENCE_LIMIT_S of the time in which it can show, and for
        EVIDENCE_STEPS steps while the fault acts. ``committed``: steps committed so far; given by
        ``tick``, which has read the event files already.
        """
        now = self._scene.now_ns()
        if live.aim is not None and live.aim.look is not None and not live.looked:
            seen = live.aim.look()
            if seen is not None:
                live.looked = True
                self.effect(live, seen)
        for tail in live.tails:
            if committed is None:
                tail.file.look()
            if events := tail.take():
                live.seen.extend(map(self._clocks.corrected, events))
        # Events examined before cannot give a new answer: only new events bring evidence.
        new, live.weighed = len(live.seen) > live.weighed, len(live.seen)
        landed = live.fault.landed(live.occurrence, live.seen) if new else None
        if landed is not None:
            self._settle(live, landed)
            return
        past_s, waited_s = (now - live.occurrence.time_ns) / NS_PER_S, live.waited_ns / NS_PER_S
        limit_s = EVIDENCE_LIMIT_S + live.fault.shows_after_s()
        acts = live.lasts and not live.healed and past_s <= LONGEST_S
        acts = acts and (committed or 0) < live.act.committed + EVIDENCE_STEPS
        if past_s > LONGEST_S + limit_s or (waited_s > limit_s and not acts):
            over = live.lasts and live.healed
            of = "" if live.fault.where in AT_ONCE else " of training"
            why = ENDED_BEFORE if live.all_ended else f"no evidence within {waited_s:.0f} s{of}"
            self.fail(live, UNSEEN if over else why)

    def _uncover(self, live: LiveOccurrence, now_ns: int) -> None:
        """Notify the rank of an overdue fault that hides itself. A rank normally ends its fault
        after a step; one that waits for a hung rank never finishes the step, so neither would be
        found.
        """
        duration_s, hides = live.planned.duration_s, live.fault.seems_still
        if not hides or duration_s is None or live.healed or live.uncovered:
            return
        if now_ns > live.occurrence.time_ns + (duration_s + OVERDUE_S) * NS_PER_S:
            live.uncovered = True
            about = {"fault": live.occurrence.fault, "occurrence": live.occurrence.number}
            for process in live.occurrence.processes:
                self._scene.send(process, Extra(topic="over", payload=about))

    def trains(self) -> None:
        """A generation trains: effects that show only in training may show from now on."""
        self._trains = True

    def _wait(self, now_ns: int) -> None:
        """Add the time since the last look to the occurrences whose effect could have shown in it.
        Most effects cannot show while the job does not train or has no coordinator, nor while
        another fault, which has not shown either, may keep ranks from finishing their step. Of
        several that may, the one that may take longest to show keeps the others.
        """
        since_ns, self._ticked_ns = self._ticked_ns, now_ns
        waiting = [live for live in self.live if not live.settled]
        lost = any(live.fault.where is Where.COORDINATOR for live in waiting)
        held_until_ns = max(
            (_shows_by_ns(live) for live in waiting if _holds(live.fault)), default=0
        )
        for live in waiting:
            last = _holds(live.fault) and _shows_by_ns(live) == held_until_ns
            goes_on = self._trains and not lost and (not held_until_ns or last)
            if goes_on or live.fault.where in AT_ONCE:
                live.waited_ns += now_ns - max(since_ns, live.occurrence.time_ns)

    def tick(self, committed: int) -> None:
        """Look for evidence, and heal what is over by time or by ``committed`` steps."""
        now = self._scene.now_ns()
        self._wait(now)
        # Read each file once for all occurrences: hundreds may wait for the same few processes.
        for file in {
            id(t.file): t.file for live in self.live if not live.settled for t in live.tails
        }.values():
            file.look()
        for live in self.live:
            if not live.settled:
                self.look(live, committed)
            self._uncover(live, now)
            if not live.healed and live.is_over(now, committed):
                self.heal(live, "its duration was over" + live.overdue(committed))

    def observe(self, event: Event) -> list[LiveOccurrence]:
        """Handle an orchestrator event: possible evidence, and data on the clocks of other
        processes. Returns the occurrences whose target died while it held for them.
        """
        self._clocks.observe(event)
        lost = event.kind is Kind.FAILURE_DETECTED and event.data["rank"] is not None
        self._trains = self._trains and not (lost or event.kind in _BROKEN)
        void = []
        for live in self.live:
            if not live.settled:
                live.seen.append(event)
            if event.kind is not Kind.PROCESS_EXITED or live.occurrence.processes != (
                event.data["process"],
            ):
                continue
            if not live.settled and live.held:
                self.look(live)
                if not live.settled and died_holding(live):
                    void.append(live)
                    continue
            if live.lasts and live.fault.where is Where.RANK:
                self.heal(live, "ended with the process it acted in")
        return void

    def joined(self, process: str) -> None:
        """Follow a new process for faults that act everywhere: it may be the process that shows the
        effect, since those hit first may be killed before they have written a line.
        """
        for live in self.live:
            if live.fault.everywhere and not live.settled and process not in live.heard:
                live.heard.add(process)
                live.tails += self._tails((process,))

    def pending(self) -> bool:
        """Whether some occurrence still waits for evidence."""
        return any(not live.settled for live in self.live)

    def close(self) -> None:
        """Heal everything, on every way out; occurrences without evidence did not land."""
        for live in self.live:
            if not live.settled:
                self.look(live)
        for live in self.live:
            if not live.settled:
                self.fail(
                    live, UNSEEN if live.healed else "the run ended before an effect was seen"
                )
            if not live.healed:
                self.heal(live, "the run ended")

    def _settle(self, live: LiveOccurrence, landed: Landed) -> None:
        live.settled = True
        if reason := unmet(live.planned.verify, landed.evidence):
            self.fail(live, f"{LANDED_OTHERWISE}: {reason}")
        else:
            self._scene.record(
                Kind.FAULT_LANDED,
                step=live.occurrence.step,
                witness=landed.witness,
                evidence=dict(landed.evidence),
                fault=live.occurrence.fault,
                occurrence=live.occurrence.number,
            )
        if not live.lasts and not live.healed and live.fault.may_last:
            self._healed(live, OVER_WHEN_DONE)  # without a duration, until its finder ends it
        elif not live.lasts and not live.healed:
            self.heal(live, OVER_WHEN_DONE)

    def _healed(self, live: LiveOccurrence, how: str, **more: Any) -> None:
        live.healed = True
        self._scene.record(
            Kind.FAULT_HEALED,
            fault=live.occurrence.fault,
            occurrence=live.occurrence.number,
            how=how,
            **more,
        )

    def _tails(self, processes: Sequence[str]) -> list[Follower]:
        events = self._scene.setup.run.events(self._scene.setup.id)
        for process in processes:
            self._files.setdefault(process, SharedTail(events / f"{process}.jsonl"))
        return [Follower(self._files[process]) for process in processes]


def _shows_by_ns(live: LiveOccurrence) -> int:
    """When its effect may show at the latest, if nothing else keeps it."""
    return live.occurrence.time_ns + round(live.fault.shows_after_s() * NS_PER_S)


def _holds(fault: Fault) -> bool:
    """Whether a fault may keep its rank in one step for long before that shows."""
    return fault.where is Where.RANK and fault.shows_after_s() > 0
