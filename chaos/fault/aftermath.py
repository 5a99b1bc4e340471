"""What has to be seen of a fault after it landed, and what contradicts that it did: small
consequences, pure functions of a log, that a fault kind names in ``Fault.follows``.

None of them believes the injector. A breach that is ``sure`` is a contradiction in the log itself;
another one says which evidence is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from chaos.fault.base import Occurrence

NS = 1_000_000_000
OVER_WHEN_DONE = "over when done"
"""How a fault without an undo ends: its effect stays for as long as its target is left as it is."""
LANDED_OTHERWISE = "it landed, but not as verify asks"
"""How the reason begins of one that landed, and is counted as failed by its scenario's ``verify``.
"""
SETTLED_NS = NS // 200  # so long may the last thread of a process take to stop
DEADLINE_SLACK_S = 30.0  # by which a signal that is due may come later on a busy machine
IN_FLIGHT = 1  # a step that a rank had as good as done when it hung


@dataclass(frozen=True, kw_only=True)
class Breach:
    """What is wrong in words, and whether the log contradicts itself or only lacks something."""

    text: str
    sure: bool = True


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """One occurrence that is said to have landed, and the whole arm around it.

    ``log``: of all actors; ``observed``: a command, of whose ranks only the outside is seen.
    """

    occurrence: Occurrence
    landed: Event
    healed: Event | None
    log: Log
    observed: bool

    def bound_ns(self, event: Event) -> int:
        """How far from the truth the time of an event may be."""
        return self.log.clocks.bound_ns(event)

    def exit_of(self, process: str) -> Event | None:
        """The reaped exit of a process."""
        return next(
            (e for e in self.log.of(Kind.PROCESS_EXITED) if e.data["process"] == process), None
        )

    def by(self, process: str, start_ns: float, end_ns: float = float("inf")) -> Iterator[Event]:
        """What a process wrote, between two times for sure."""
        for event in self.log.by(process) if process != ORCHESTRATOR else ():
            bound_ns = self.bound_ns(event)
            if event.time_ns - bound_ns > start_ns and event.time_ns + bound_ns < end_ns:
                yield event

    def left_behind_ns(self, process: str) -> int:
        """When the first generation began without it; the last moment known if none did."""
        for event in self.log.of(Kind.GENERATION_STARTED):
            if event.time_ns > self.landed.time_ns and process not in event.data["members"]:
                return event.time_ns
        return self.end_ns

    @property
    def undone_ns(self) -> int:
        """When it was undone; the last moment known if it never was."""
        healed = self.healed
        if healed is None or str(healed.data["how"]).startswith(OVER_WHEN_DONE):
            return self.end_ns
        return healed.time_ns

    @property
    def end_ns(self) -> int:
        """The last moment known."""
        return self.log.events[-1].time_ns


class Consequence(ABC):
    """Something that must be so after a fault landed."""

    @abstractmethod
    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """What of it is not so."""


@dataclass(frozen=True, kw_only=True)
class Ends(Consequence):
    """Each process hit ends, by a ``signal`` if one is named, or with a ``code``, and writes
    nothing afterwards.
    """

    signal: int | None = None
    code: bool = False

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """An exit that is missing, another one, or not the last that was heard of it."""
        for process in after.occurrence.processes:
            ended = after.exit_of(process)
            if ended is None:
                yield Breach(text=f"nobody saw {process} end", sure=False)
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
                yield Breach(text=f"{process} was hit, and ended well, unasked")
            if _unasked(after, ended):
                yield Breach(
                    text=f"{process} is said to have been asked to end, and nobody had asked it"
                )
            for event in after.by(process, ended.time_ns):
                yield Breach(text=f"{process} had ended, and goes on: {_what(event)}")
                break


@dataclass(frozen=True, kw_only=True)
class RaisesAndEnds(Ends):
    """As ``Ends`` with a code, where a process ended of it. A script's may live on."""

    code: bool = True

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """None of a script: what it does with an exception is its own affair."""
        return iter(()) if after.observed else super().breaches(after)


@dataclass(frozen=True, kw_only=True)
class StandsStill(Consequence):
    """Each process hit does nothing until it is healed, ends, or others go on without it (what it
    does then is for whoever judges commits).
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """Something that it did meanwhile."""
        for process in after.occurrence.processes:
            ended = after.exit_of(process)
            left_ns = after.left_behind_ns(process)
            until = min(
                after.undone_ns, left_ns, ended.time_ns if ended is not None else after.end_ns
            )
            for event in after.by(process, after.landed.time_ns + SETTLED_NS, until):
                yield Breach(text=f"{process} was stopped, and goes on: {_what(event)}")
                break


@dataclass(frozen=True, kw_only=True)
class HangsUntilDeclared(Consequence):
    """Where it is known from a hang that was declared, the process committed nothing from the act
    to that.
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """Steps that it committed meanwhile."""
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
                text=f"{hit} hung, and committed {len(done)} steps before that was declared"
            )


@dataclass(frozen=True, kw_only=True)
class GoneBy(Consequence):
    """Each process hit is gone so many seconds after the act."""

    seconds: float

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """One that was seen alive long after."""
        limit_ns = after.occurrence.time_ns + int((self.seconds + DEADLINE_SLACK_S) * NS)
        for process in after.occurrence.processes:
            ended = after.exit_of(process)
            if after.end_ns > limit_ns and (ended is None or ended.time_ns > limit_ns):
                yield Breach(
                    text=f"{process} was to be gone after {self.seconds:g} s, and lived on"
                )


@dataclass(frozen=True, kw_only=True)
class SaidByTarget(Consequence):
    """The affected rank itself reported what was changed inside of it, and only that rank. A
    script's report comes through the process that watches it.
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """The account of another one."""
        hit = after.occurrence
        for event in after.log.of(Kind.FAULT_EFFECT):
            about = "after" in event.data["evidence"]
            if not about or (event.data["fault"], event.data["occurrence"]) != (
                hit.fault,
                hit.number,
            ):
                continue
            if not after.observed and event.actor not in hit.processes:
                yield Breach(
                    text=f"{hit.process} was hit, and the account of it is of {event.actor}"
                )


@dataclass(frozen=True, kw_only=True)
class NothingSaved(Consequence):
    """No save begins and ends on the disk while it takes nothing. Memory takes them."""

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """One that did."""
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
                        f"the disk took nothing, and {event.actor} saved {event.data['checkpoint']}"
                    )
                )


@dataclass(frozen=True, kw_only=True)
class NobodyDecides(Consequence):
    """Between the loss of the coordinator and the takeover nothing is declared, decided or
    formed.
    """

    def breaches(self, after: Aftermath) -> Iterator[Breach]:
        """Declarations, decisions and generations in that time."""
        start_ns = after.occurrence.time_ns
        taken = (e for e in after.log.of(Kind.COORDINATOR_ADOPTED) if e.time_ns > start_ns)
        until = next(taken, None)
        acts = (Kind.FAILURE_DETECTED, Kind.DECISION, Kind.ABORT_SENT, Kind.GENERATION_STARTED)
        for event in after.log.of(*acts) if until is not None else ():
            assert until is not None
            if start_ns < event.time_ns < until.time_ns:
                yield Breach(
                    text=(
                        f"the coordinator was lost, and there is a {event.kind} before the takeover"
                    )
                )


def _unasked(after: Aftermath, ended: Event) -> bool:
    """Whether an exit that is called expected was declared a failure when it came. (One that was
    declared before it came, as its connections broke, may be called so: it was fenced.)
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
