"""Consequences that must follow a landed fault. Each is a pure function of a log that finds missing
or contradicting evidence; a fault kind names its consequences in ``Fault.follows``.

No consequence relies on the injector. A ``sure`` breach is a contradiction in the log itself; any
other names missing evidence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log

NS = 1_000_000_000
OVER_WHEN_DONE = "over when done"
"""Prefix of ``how`` in ``fault_healed`` for a fault without an undo: its effect lasts as long as
its target.
"""
LANDED_OTHERWISE = "it landed, but not as verify asks"
"""Prefix of the reason when a fault landed but does not meet its scenario's ``verify``, and so
counts as failed.
"""
SETTLED_NS = NS // 200  # time for the last thread of a process to stop
DEADLINE_SLACK_S = 30.0  # allowed lateness of a scheduled signal on a busy machine
IN_FLIGHT = 1  # a step almost finished when the rank hung


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """One firing of one planned fault, with its target resolved. ``time_ns``: just before the act,
    monotonic.

    ``processes``: all processes hit, where there can be more than one (a node); ``target``: as
    recorded.
    """

    fault: str
    number: int
    process: str | None = None
    rank: int | None = None
    processes: tuple[str, ...] = ()
    checkpoint: str | None = None
    step: int | None = None
    target: Mapping[str, Any] = field(default_factory=dict)
    time_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Breach:
    """What is wrong; ``sure``: the log contradicts itself, otherwise evidence is only missing."""

    text: str
    sure: bool = True


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """One occurrence recorded as landed, with the log of its whole arm.

    ``log``: of all actors; ``observed``: the job is a command, observed only from outside.
    """

    occurrence: Occurrence
    landed: Event
    healed: Event | None
    log: Log
    observed: bool

    def bound_ns(self, event: Event) -> int:
        """Maximum clock error of an event's time."""
        return self.log.clocks.bound_ns(event)

    def exit_of(self, process: str) -> Event | None:
        """The reaped exit of a process."""
        return next(
            (e for e in self.log.of(Kind.PROCESS_EXITED) if e.data["process"] == process), None
        )

    def by(self, process: str, start_ns: float, end_ns: float = float("inf")) -> Iterator[Event]:
        """Events of a process that lie between two times beyond doubt, given the clock error."""
        for event in self.log.by(process) if process != ORCHESTRATOR else ():
            bound_ns = self.bound_ns(event)
            if event.time_ns - bound_ns > start_ns and event.time_ns + bound_ns < end_ns:
                yield event

    def left_behind_ns(self, process: str) -> int:
        """Start of the first later generation without the process; the end of the log if there is
        none.
        """
        for event in self.log.of(Kind.GENERATION_STARTED):
            if event.time_ns > self.landed.time_ns and process not in event.data["members"]:
                return event.time_ns
        return self.end_ns

    @property
    def undone_ns(self) -> int:
        """When the undoing of the fault began; the end of the log if never. On a busy machine its
        target may work for long before its heal is written.
        """
        healed = self.healed
        if healed is None or str(healed.data["how"]).startswith(OVER_WHEN_DONE):
            return self.end_ns
        begun_ns = healed.data.get("begun_ns")
        return int(begun_ns) if isinstance(begun_ns, int) else healed.time_ns

    @property
    def end_ns(self) -> int:
        """Time of the last event."""
        return self.log.events[-1].time_ns


class Consequence(ABC):
    """Something that must hold after a fault landed."""

    @abstractmethod
    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """Violations of the consequence."""


@dataclass(frozen=True, kw_only=True)
class Ends(Consequence):
    """Each process hit ends, by a ``signal`` if one is named, or with a ``code``, and writes
    nothing afterwards.
    """

    signal: int | None = None
    code: bool = False

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """A missing or different exit, or events after it."""
        for process in after.occurrence.processes:
            ended = after.exit_of(process)
            if ended is None:
                yield Breach(text=f"the end of {process} was not seen", sure=False)
                continue
            how = ended.data["signal"], ended.data["exit_code"]
            if self.signal is not None and how[0] != self.signal:
                yield Breach(
                    text=f"{process} was reaped with {_how(ended)} instead of signal {self.signal}"
                )
            elif self.code and not how[1]:
                yield Breach(
                    text=f"{process} was reaped with {_how(ended)} instead of an exit code"
                )
            elif self.signal is None and how[1] == 0 and not ended.data["expected"]:
                yield Breach(
                    text=f"{process} was hit, but exited successfully without being asked to"
                )
            if _unasked(after, ended):
                yield Breach(
                    text=f"{process} is recorded as asked to end, but its exit came unasked"
                )
            for event in after.by(process, ended.time_ns):
                yield Breach(text=f"{process} had ended, but continues: {_what(event)}")
                break


@dataclass(frozen=True, kw_only=True)
class RaisesAndEnds(Ends):
    """As ``Ends`` with an exit code, except for a script, which may catch the exception and live
    on.
    """

    code: bool = True

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """As for ``Ends``; nothing for a script, which may handle an exception as it likes."""
        return iter(()) if after.observed else super().breaches(after)


@dataclass(frozen=True, kw_only=True)
class StandsStill(Consequence):
    """Each process hit does nothing until it is healed, ends, or a generation starts without it
    (later commits are judged by other checkers).
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """Events of the process while it was stopped."""
        for process in after.occurrence.processes:
            ended = after.exit_of(process)
            left_ns = after.left_behind_ns(process)
            until = min(
                after.undone_ns, left_ns, ended.time_ns if ended is not None else after.end_ns
            )
            for event in after.by(process, after.landed.time_ns + SETTLED_NS, until):
                yield Breach(text=f"{process} was stopped, but continues: {_what(event)}")
                break


@dataclass(frozen=True, kw_only=True)
class HangsUntilDeclared(Consequence):
    """If a declared hang is the evidence, the process committed nothing between the act and the
    declaration.
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """Steps committed between the act and the declaration."""
        hit, start_ns = after.occurrence.process, after.occurrence.time_ns
        declared = next(
            (
                e
                for e in after.log.of(Kind.FAILURE_DETECTED)
                if e.data["cause"] == "hang" and e.data["process"] == hit and e.time_ns > start_ns
            ),
            None,
        )
        if declared is None or hit is None or declared.time_ns > after.landed.time_ns:
            return
        done = [
            e for e in after.by(hit, start_ns, declared.time_ns) if e.kind is Kind.STEP_COMMITTED
        ]
        if len(done) > IN_FLIGHT:
            yield Breach(
                text=f"{hit} hung, but committed {len(done)} steps before that was declared"
            )


@dataclass(frozen=True, kw_only=True)
class EndsWithin(Consequence):
    """Each process hit has ended ``seconds`` after the act."""

    seconds: float

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """A process still alive long after the deadline."""
        limit_ns = after.occurrence.time_ns + int((self.seconds + DEADLINE_SLACK_S) * NS)
        for process in after.occurrence.processes:
            ended = after.exit_of(process)
            if after.end_ns > limit_ns and (ended is None or ended.time_ns > limit_ns):
                yield Breach(
                    text=f"{process} should have ended after {self.seconds:g} s, but lived on"
                )


@dataclass(frozen=True, kw_only=True)
class ReportedByTarget(Consequence):
    """Only the affected rank itself reported the change inside it. A script's report comes from the
    process that watches the script.
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """A report by another process."""
        hit = after.occurrence
        for event in after.log.of(Kind.FAULT_EFFECT):
            about = "after" in event.data["evidence"]
            if not about or (event.data["fault"], event.data["occurrence"]) != (
                hit.fault,
                hit.number,
            ):
                continue
            if not after.observed and event.actor not in hit.processes:
                yield Breach(text=f"{hit.process} was hit, but {event.actor} reported it")


@dataclass(frozen=True, kw_only=True)
class NothingSaved(Consequence):
    """No save both begins and ends on the disk while the disk accepts no writes. Saves to memory
    may succeed.
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """A save that did."""
        until = after.undone_ns
        begun: set[tuple[str, str]] = set()
        for event in after.log.of(Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_COMMITTED):
            bound_ns = after.bound_ns(event)
            sure = (
                after.landed.time_ns < event.time_ns - bound_ns and event.time_ns + bound_ns < until
            )
            if not sure or event.data.get("place"):
                continue
            if event.kind is Kind.CHECKPOINT_SAVING:
                begun.add((event.actor, event.data["checkpoint"]))
            elif (event.actor, event.data["checkpoint"]) in begun:
                yield Breach(
                    text=(
                        f"the disk took nothing, but {event.actor} saved {event.data['checkpoint']}"
                    )
                )


@dataclass(frozen=True, kw_only=True)
class NothingDecided(Consequence):
    """Between the loss of the coordinator and the takeover, no failure is declared, nothing is
    decided and no generation starts.
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """Declarations, decisions and generations between the loss and the takeover."""
        start_ns = after.occurrence.time_ns
        taken = (e for e in after.log.of(Kind.COORDINATOR_ADOPTED) if e.time_ns > start_ns)
        until = next(taken, None)
        acts = (Kind.FAILURE_DETECTED, Kind.DECISION, Kind.ABORT_SENT, Kind.GENERATION_STARTED)
        for event in after.log.of(*acts) if until is not None else ():
            assert until is not None
            if start_ns < event.time_ns < until.time_ns:
                yield Breach(
                    text=(
                        f"the coordinator was lost, but there is a {event.kind} before the takeover"
                    )
                )


def _unasked(after: Aftermath, ended: Event) -> bool:
    """Whether an exit recorded as expected was declared a failure after it happened. (One declared
    before the exit, when connections broke, may be recorded as expected: the process was fenced.)
    """
    if not ended.data["expected"] or ended.data.get("asked_ns", 0) is not None:
        return False
    return any(
        e.data["process"] == ended.data["process"]
        and e.data["cause"] == "exit"
        and (e.time_ns, e.seq) > (ended.time_ns, ended.seq)
        for e in after.log.of(Kind.FAILURE_DETECTED)
    )


def _how(ended: Event) -> str:
    signum, code = ended.data["signal"], ended.data["exit_code"]
    return f"signal {signum}" if signum is not None else f"exit code {code}"


def _what(event: Event) -> str:
    return f"{event.kind} of step {event.step}" if event.step is not None else str(event.kind)
