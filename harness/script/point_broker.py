"""Stands in for the agents that a command's ranks do not have.

A rank of a built-in workload receives the points to hold at for a fault, and reports when it holds.
A command without points cannot hold: a point counts as reached once the step before is reported. A
script that calls ``beacon.point`` really holds there, and gets the injector's decision from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.beacon import EVERY_STEP
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.fault.build import build_all
from trainchaos.chaos.schedule.plan import DEFAULT_PHASE, NEXT_STEP, PlannedFault
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.script.listen.numbers import in_json
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.points import PointDone, PointRequest, Points
from trainchaos.harness.script.processes.hang_witness import HangWitness
from trainchaos.harness.script.processes.ranks import Ranks
from trainchaos.recovery.process.host import RecordEvent
from trainchaos.recovery.transport.wire import Extra, Message

OUTPUT_LIMIT = 200
STRANGER_S = 3.0  # how long a process holds before it is found to be a rank
NS = 1e9
POINT_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "data": ("data", "forward"),  # the start of the step, where the script may have no point
        "forward": ("forward",),
        "backward": ("backward",),
        "collective": ("gradient", "collective"),
        "optimizer": ("optimizer",),
        "checkpoint": ("saving", "checkpoint"),
    }
)
"""Phase of a scenario -> names of its points in a script."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A point sent to a process. ``held``: the script has a point there; otherwise it is observed
    from outside.
    """

    fault: str
    step: int
    phase: str
    held: bool

    def at(self, step: int) -> Extra:
        """That it is reached."""
        about = {"fault": self.fault, "step": step, "phase": self.phase}
        return Extra(topic="at_point", payload=about)

    def holds(self, step: int, name: str) -> bool:
        """Whether a process holds for it at this point."""
        due = self.held and self.step in (NEXT_STEP, step)
        return due and name in POINT_NAMES.get(self.phase, ())


@dataclass(kw_only=True)
class _Hold:
    """A process that holds. ``rows``: the points it holds for; the injector knows of the first."""

    asked: PointRequest
    since_ns: int
    process: str | None = None
    rows: list[_Row] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Order:
    """An act that a process was ordered to do itself."""

    process: str
    asked: PointRequest
    word: str
    fault: str
    occurrence: int

    def evidence(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        """The event that says so."""
        about = {"fault": self.fault, "occurrence": self.occurrence}
        return {"step": self.asked.step, **about, "evidence": dict(seen)}


class PointBroker:
    """The points that the injector has given to the ranks of the present generation.

    ``points``: opens where the processes of a script with points ask, None for a script without;
    ``printed``: lines they printed about exceptions raised there.
    """

    def __init__(
        self,
        plan: Sequence[PlannedFault],
        kinds: Mapping[str, type[Fault]],
        points: Callable[[Iterable[tuple[int, str]]], Points] | None,
        *,
        printed: Callable[[], Sequence[str]] = list,
    ) -> None:
        self._faults = build_all(plan, kinds) if points else {}
        self._phases = places(plan, self._faults) if points else {}
        named = {(step, name) for (_, step), names in self._phases.items() for name in names}
        self._points = points(sorted(named)) if points else None
        self._rows: dict[str, list[_Row]] = {}
        self._holds: dict[int, _Hold] = {}  # by connection
        self._orders: dict[int, _Order] = {}
        self._raising: list[_Order] = []
        self._standing: HangWitness[_Order] = HangWitness()
        self._printed = printed
        self._out: list[tuple[str, Extra]] = []
        # remaining firings, by (fault, step)
        self._left: Counter[tuple[str, int]] = Counter()
        for planned in plan:
            for step, _ in planned.points:
                self._left[planned.id, step] += planned.max_fires * max(1, len(planned.ranks))
        self._arm_places()

    def forget(self) -> None:
        """A new generation: its processes and points replace the old ones."""
        self._rows = {}

    def take(self, process: str, message: Message) -> bool:
        """Handle a message of the injector to a rank."""
        if isinstance(message, Extra) and message.topic == "arm":
            self._rows[process] = [
                _Row(
                    fault=row["fault"],
                    step=int(row["step"]),
                    phase=row["phase"],
                    held=self._held(row["fault"], row["phase"]),
                )
                for row in message.payload["points"]
            ]
            for hold in self._holds.values():
                if hold.process == process:  # the point that it holds at may be armed again
                    hold.process, hold.rows = None, []
            self._arm_places()
        elif isinstance(message, Extra) and message.topic == "go":
            self._go(process, message.payload)
        return True

    def due(self, committed: int, resumed_after: int) -> list[tuple[str, Extra]]:
        """(process, message) for every point without a hold that ``committed`` steps reach, once
        each.

        ``resumed_after``: the step that the generation began with; points at or before it are past.
        """
        found = []
        for process, rows in self._rows.items():
            mine = [row for row in rows if not row.held and row.step <= committed + 1]
            self._rows[process] = [row for row in rows if row not in mine]
            found += [(process, row.at(row.step)) for row in mine if row.step > resumed_after]
        return found

    # ---- processes that hold

    def hear(
        self, injector: Injector, observer: Observer, ranks: Ranks, record: RecordEvent, now_ns: int
    ) -> None:
        """Read what processes report at their points, and notify the injector and the observer."""
        if self._points is None:
            return
        for said in self._points.listen():
            if isinstance(said, PointRequest):
                self._holds[said.connection] = _Hold(asked=said, since_ns=now_ns)
            elif isinstance(said, PointDone):
                self._did(said, observer, record, now_ns)
            else:
                self._holds.pop(said.connection, None)
                self._orders.pop(said.connection, None)
        self._witness(record, now_ns)
        self._match(ranks.name_of, now_ns)
        while self._out:
            process, message = self._out.pop(0)
            injector.on_said(process, observer.rank_of(process), message)

    def injected(self, event: Event) -> None:
        """A fault fired: disarm its point, unless it is to fire again."""
        if event.step is not None and self._left[event.data["fault"], event.step] > 0:
            self._left[event.data["fault"], event.step] -= 1
            self._arm_places()

    def close(self) -> None:
        """Release every process."""
        if self._points is not None:
            self._points.close()

    def fileno(self) -> int | None:
        """Readable when a process sends something."""
        return None if self._points is None else self._points.fileno()

    def _match(self, name_of: Callable[[int], str | None], now_ns: int) -> None:
        for connection, hold in list(self._holds.items()):
            if hold.process is not None:
                continue
            process, place = name_of(hold.asked.pid), (hold.asked.step, hold.asked.name)
            if process in self._rows:
                hold.process = process
                hold.rows = [row for row in self._rows[process] if row.holds(*place)]
                self._rows[process] = [row for row in self._rows[process] if row not in hold.rows]
                self._next(connection, hold)
                self._arm_places()
            elif (
                self._wanted.isdisjoint({place, (EVERY_STEP, hold.asked.name)})
                or (now_ns - hold.since_ns) / NS > STRANGER_S
            ):
                self._answer(connection, hold, "go")

    def _next(self, connection: int, hold: _Hold) -> None:
        if hold.rows and hold.process is not None:
            self._out.append((hold.process, hold.rows[0].at(hold.asked.step)))
        else:
            self._answer(connection, hold, "go")

    def _go(self, process: str, payload: Mapping[str, Any]) -> None:
        """Release a process that holds, or order it to act."""
        found = next(((c, h) for c, h in self._holds.items() if h.process == process), None)
        if found is None:
            if payload["act"]:
                about = {"fault": payload["fault"], "occurrence": payload["occurrence"]}
                self._out.append((process, Extra(topic="missed", payload=about)))
            return
        connection, hold = found
        if not payload["act"]:
            hold.rows = hold.rows[1:]
            self._next(connection, hold)
            return
        fault = self._faults[payload["fault"]]
        self._orders[connection] = _Order(
            process=process,
            asked=hold.asked,
            word=fault.by_script,
            fault=payload["fault"],
            occurrence=payload["occurrence"],
        )
        said = f"{fault.by_script} {fault.for_script(hold.asked.step)}"
        self._answer(connection, hold, said.rstrip())

    def _did(self, said: PointDone, observer: Observer, record: RecordEvent, now_ns: int) -> None:
        order = self._orders.get(said.connection)
        if order is None or (order.asked.step, order.word) != (said.step, said.what):
            return  # not ordered
        del self._orders[said.connection]
        values = {"before": said.before, "after": said.after}
        plain = {name: in_json(value) for name, value in values.items() if value is not None}
        record(Kind.FAULT_EFFECT, **order.evidence({"script": said.what} | plain))
        if said.what == "raise":
            self._raising.append(order)
            observer.on_error(
                order.process, f"its script raised at its point in step {said.step}", now_ns
            )
        if said.what == "hang":
            thread = said.before if said.before is not None and 0 < said.before < 2**31 else 0
            self._standing.watch(order, pid=order.asked.pid, tid=int(thread), now_ns=now_ns)

    def _witness(self, record: RecordEvent, now_ns: int) -> None:
        """Evidence besides the script's own report: the printed error of a process that raised, and
        the processor time of a thread that hangs.
        """
        for order, seen in self._standing.seen(now_ns):
            record(Kind.FAULT_EFFECT, **order.evidence(seen))
        for line in self._printed() if self._raising else ():
            for order in [each for each in self._raising if f"(step {each.asked.step})" in line]:
                self._raising.remove(order)
                record(Kind.FAULT_EFFECT, **order.evidence({"output": line[:OUTPUT_LIMIT]}))

    def _answer(self, connection: int, hold: _Hold, word: str) -> None:
        assert self._points is not None
        del self._holds[connection]
        self._points.answer(connection, hold.asked.number, word)

    # ---- points worth holding at

    def _held(self, fault: str, phase: str) -> bool:
        held = self._faults.get(fault)
        return held is not None and (held.where is Where.RANK or phase != DEFAULT_PHASE)

    def _arm_places(self) -> None:
        """Arm the points that faults wait for; processes pass all others without asking."""
        wanted = {
            (step, name)
            for (fault, step), phases in self._phases.items()
            if self._left[fault, step] > 0 or step == NEXT_STEP
            for name in phases
            if step != NEXT_STEP or self._waits(name)
        }
        self._wanted = wanted
        if self._points is not None:
            self._points.arm(wanted)

    def _waits(self, name: str) -> bool:
        """Whether a rank must hold there in its next step."""
        return any(
            row.step == NEXT_STEP and row.held and name in POINT_NAMES.get(row.phase, ())
            for rows in self._rows.values()
            for row in rows
        )


def places(
    plan: Iterable[PlannedFault], faults: Mapping[str, Fault]
) -> dict[tuple[str, int], tuple[str, ...]]:
    """(fault, step) -> names of the points at which a process must hold for it; step 0: any step,
    for faults that no step triggers. ``faults``: by id.
    """
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    for planned in plan:
        fault = faults[planned.id]
        inside = fault.where is Where.RANK
        for step, phase in planned.points:
            if inside or phase != DEFAULT_PHASE:
                names = POINT_NAMES.get(fault.point(phase), ())
                found[planned.id, step] = (*found.get((planned.id, step), ()), *names)
        if inside and not planned.points:
            found[planned.id, NEXT_STEP] = POINT_NAMES.get(fault.point(DEFAULT_PHASE), ())
    return found
