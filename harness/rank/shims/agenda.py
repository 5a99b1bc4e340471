"""A rank's agenda: the injector's commands to it, and the order to carry them out; the fault agent
without a clock, a thread or a body.

``harness.rank.fault_agent`` runs it on a training thread, and ``harness.sim.rank.faults`` in a
simulated rank. Both wait where it yields a ``Wait``, and carry out the calls of ``AgendaRank`` at
once; everything else is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.fault.build import build
from trainchaos.chaos.schedule.plan import NEXT_STEP
from trainchaos.harness.arm.in_force import ActiveEffects

HOLD_LIMIT_S = 30.0
"""How long a rank holds for an injector that does not answer; as in ``chaos.beacon``. A live
injector answers long before that (``chaos.schedule.trigger.PATIENCE_S``).
"""
LOOK_S = 0.05
NS_PER_S = 1_000_000_000

Command = Mapping[str, Any]
"""A command of the injector for an occurrence (``harness.inject.occurrences.command_of``), or a
point to hold at.
"""


@dataclass(frozen=True, kw_only=True)
class HoldAnswer:
    """Wait until ``Agenda.answered``, at most ``limit_s``, and show a sign of life every
    ``look_s``: only the fault itself may look like a hang.
    """

    limit_s: float
    look_s: float


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Wait without a sign of life, as in a call that does not return."""

    seconds: float


@dataclass(frozen=True)
class Acted:
    """A fault acted: wait for an effect that blocks the rank, if the act itself could not block."""


Wait = HoldAnswer | Stall | Acted


class AgendaRank(Protocol):
    """The rank that runs an agenda; faults act on it as their
    ``chaos.fault.targets.RankTarget``.
    """

    def now_ns(self) -> int:
        """Time of its own clock."""

    def say(self, topic: str, payload: dict[str, Any]) -> None:
        """Send to the injector; from any thread."""

    def log(self, *, step: int, fault: str, occurrence: int, evidence: dict[str, Any]) -> None:
        """Record evidence of an act (``fault_effect``)."""

    def do(self, action: Callable[[], None], surface: str | None, /) -> Mapping[str, Any] | None:
        """Do it, and return the digests ``before`` and ``after`` of the stored tensors (of
        ``surface``, if given); None if nothing is measured. LookupError: the target does not exist
        yet.
        """


@dataclass(frozen=True, kw_only=True)
class _Lasting:
    """A fault in force, and when it ends."""

    fault: Fault
    command: Command
    until_ns: float
    until_step: float


@dataclass(frozen=True, kw_only=True)
class _Next:
    """A remaining act of a fault, at the same phase of a later step."""

    phase: str
    after_step: int
    surface: str | None
    command: Command
    action: Callable[[], None]


class Agenda:
    """The agenda of one rank. ``lock``: needed if one thread receives and another trains.

    ``rank``, ``step``, ``seed``: of the rank at the last point with something to do; ``command``:
    the current one, or the last; ``data_delay_s``: extra time of the data phase of each step.
    """

    def __init__(
        self, hands: AgendaRank, *, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self.rank = -1
        self.step = 0
        self.seed = 0
        self.command: Command = {}
        self.data_delay_s = 0.0
        self._hands = hands
        self._lock: AbstractContextManager[object] = lock or nullcontext()
        self._armed: dict[tuple[int, str], list[Command]] = {}
        self._standing: list[Command] = []
        self._installed: set[tuple[str, int]] = set()
        self._lasting: list[_Lasting] = []
        self._next: list[_Next] = []
        self._acting: Fault | None = None
        self._wanted = ActiveEffects()
        self._holds = ""  # the fault that it holds for, until the injector answers
        self._answer: Command | None = None

    @property
    def active(self) -> bool:
        """Whether anything is due at some point."""
        return bool(self._armed or self._standing or self._lasting or self._next)

    @property
    def answered(self) -> bool:
        """Whether the injector has answered the rank that holds."""
        return self._answer is not None

    def hear(self, topic: str, payload: Mapping[str, Any]) -> bool:
        """Handle a message. ``arm``: {"points": [...], "standing": [...]} replaces what is armed;
        ``go``: act now (or not, if ``act`` is False); ``over``: end a fault in force, since the
        rank may wait for one that hangs; other topics are ignored. Returns whether it answers the
        rank that holds.
        """
        if topic == "over":
            self._end(lambda lasting: _names(lasting.command) == dict(payload))
        if topic == "arm":
            armed: dict[tuple[int, str], list[Command]] = {}
            for point in payload["points"]:
                armed.setdefault((point["step"], point["phase"]), []).append(point)
            with self._lock:
                self._armed, self._standing = armed, list(payload["standing"])
        if topic != "go":
            return False
        with self._lock:
            mine = payload["fault"] == self._holds
            if mine:
                self._answer = payload
        if not mine:
            self._miss(payload)
        return mine

    # ---- called by the training code

    def at(self, step: int, phase: str, *, rank: int) -> Generator[Wait, None, None]:
        """The rank is at this phase of this step: do what is due there, between the waits. If the
        rank cannot continue, since its generation is lost, it must close the generator.
        """
        for command in self._take_standing():
            if (command["fault"], command["occurrence"]) not in self._installed:
                self.rank, self.seed = rank, command["seed"]
                self._act(command, command["step"])
                yield Acted()
        for point in self._take_armed(step, phase):
            self.step, self.rank, self.seed = step, rank, point["seed"]
            answer = yield from self._hold({"fault": point["fault"], "step": step, "phase": phase})
            if answer is not None and answer["act"]:
                self._act(answer, step)
                yield Acted()
        if phase == "data" and self.data_delay_s:
            yield Stall(seconds=self.data_delay_s)
        for item in [item for item in self._next if item.phase == phase and item.after_step < step]:
            self._next.remove(item)
            self.step, self.rank, self.command = step, rank, item.command
            measured = self._hands.do(item.action, item.surface)
            if measured is not None:
                self.effect(item.command, measured)
            yield Acted()

    def committed(self, step: int) -> None:
        """End faults whose duration is over."""
        if self._lasting:
            now_ns = self._hands.now_ns()
            self._end(lambda one: step >= one.until_step or now_ns >= one.until_ns)

    def _end(self, over: Callable[[_Lasting], bool]) -> None:
        with self._lock:
            ended = [lasting for lasting in self._lasting if over(lasting)]
            self._lasting = [lasting for lasting in self._lasting if lasting not in ended]
        for lasting in ended:
            self.command, before = lasting.command, self.command
            lasting.fault.heal(self._hands)
            self.command = before
            self._hands.say("healed", _names(lasting.command))

    def next_step(self, action: Callable[[], None]) -> None:
        """See chaos.fault.targets.RankTarget. Raises RuntimeError outside an act."""
        if self._acting is None:
            raise RuntimeError("only an act has a next step")
        phase, surface = self._acting.point("forward"), getattr(self._acting, "surface", None)
        self._next.append(
            _Next(
                phase=phase,
                after_step=self.step,
                surface=surface,
                command=self.command,
                action=action,
            )
        )

    def wanted(self, what: str, value: Any) -> list[Any]:
        """Values that all faults now want for something that they set, newest last. ``value``: the
        value of the fault that acts or ends now; None removes it.
        """
        by = (self.command.get("fault"), self.command.get("occurrence"))
        if value is None:
            return self._wanted.end(what, "", by)
        return self._wanted.begin(what, "", by, value)

    def effect(self, command: Command, evidence: Mapping[str, Any]) -> None:
        """Log evidence of an act, whenever it is found."""
        self._hands.log(step=self.step, evidence=dict(evidence), **_names(command))

    # ---- one point

    def _take_standing(self) -> list[Command]:
        """Faults that act in all ranks act in this one too, even if it joined later."""
        with self._lock:
            standing, self._standing = self._standing, []
        return standing

    def _take_armed(self, step: int, phase: str) -> tuple[Command, ...]:
        with self._lock:
            return *self._armed.pop((step, phase), ()), *self._armed.pop((NEXT_STEP, phase), ())

    def _hold(self, where: dict[str, Any]) -> Generator[Wait, None, Command | None]:
        with self._lock:
            self._holds, self._answer = where["fault"], None
        self._hands.say("at_point", where)
        try:
            yield HoldAnswer(limit_s=HOLD_LIMIT_S, look_s=LOOK_S)
        except GeneratorExit:
            # A command that arrives at the moment its generation is lost is not carried out.
            self._miss(self._leave() or {"act": False})
            raise
        answer = self._leave()
        if answer is None:
            self._hands.say("unanswered", where)
        return answer

    def _leave(self) -> Command | None:
        """Stop holding; returns the answer, which may have arrived at the last moment."""
        with self._lock:
            answer, self._answer, self._holds = self._answer, None, ""
        return answer

    def _miss(self, go: Command) -> None:
        """The command to act came too late: make the injector arm the fault again."""
        if go["act"]:
            self._hands.say("missed", _names(go))

    def _act(self, command: Command, step: int) -> None:
        fault = build(command["kind"], command["params"])
        if fault.where is not Where.RANK:
            return
        self.step, self.command, self._acting = step, command, fault
        if fault.everywhere:
            self._installed.add((command["fault"], command["occurrence"]))
        done: dict[str, Any] = {}
        try:
            measured = self._hands.do(lambda: done.update(fault.act(self._hands)), fault.changes())
        # for example an optimizer's state before its first step: the fault does not land
        except LookupError as error:
            self.effect(command, {"nothing": str(error)})
            return
        finally:
            self._acting = None
        self.effect(command, done | dict(measured or {}))
        if fault.lasting:
            with self._lock:
                self._lasting = [*self._lasting, self._in_force(fault, command)]

    def _in_force(self, fault: Fault, command: Command) -> _Lasting:
        seconds, steps, never = command["duration_s"], command["duration_steps"], float("inf")
        return _Lasting(
            fault=fault,
            command=command,
            until_ns=self._hands.now_ns() + seconds * NS_PER_S if seconds is not None else never,
            until_step=self.step + steps if steps is not None else never,
        )


def _names(command: Command) -> dict[str, Any]:
    return {"fault": command["fault"], "occurrence": command["occurrence"]}
