"""The coordinator of a job: a controller that can be lost, and successors that take over from the
log.

A loss takes the controller and all its state; the orchestrator around it (processes, injector,
event log) belongs to the test, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import Kind, read_actor
from trainchaos.harness.launch.launcher import MessageReceived, Report
from trainchaos.recovery.policy.strategy import StateFrom
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.supervise.adoption import past
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.supervise.supervision import Hands
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Extra, Message

Make = Callable[[Hands], Controller]
FIRST_STATE = StateFrom.INITIAL  # an arm has a checkpoint directory of its own, which is empty


class Coordinator:
    """Runs one controller at a time. ``controller``: the current one, or the one lost last.
    ``before``: see ``RevocableHands``.
    """

    def __init__(
        self, make: Make, hands: Hands, log: Path, before: Callable[[str], None] | None = None
    ) -> None:
        self._make = make
        self._hands = hands
        self._log = log
        self._before = before
        self._absence: CoordinatorAbsence | None = None
        self._access = RevocableHands(hands, before)
        self.controller = make(self._access)

    @property
    def there(self) -> bool:
        """Whether a controller supervises the job now."""
        return self._absence is None

    def start(self) -> None:
        """Begin the job."""
        self.supervise(lambda controller: controller.start(FIRST_STATE))

    def supervise(self, act: Callable[[Controller], None]) -> None:
        """Let the controller act, if there is one; it may be lost in the middle of that."""
        if self._absence is None:
            try:
                act(self.controller)
            except CoordinatorLost:
                pass

    def lose(self, down_s: float) -> None:
        """Lose the controller with all its state, even in the middle of an act."""
        now_ns = int(self._hands.now_s() * 1e9)
        self._access.lost = True
        self._absence = CoordinatorAbsence(
            since_ns=now_ns, until_ns=now_ns + int(down_s * 1e9), stage=self.controller.stage.value
        )

    def misses(self, report: Report) -> bool:
        """Whether no controller receives a report now. Messages are kept for the next one; exits
        are in the log.
        """
        if self._absence is None or (
            isinstance(report, MessageReceived) and isinstance(report.message, Extra)
        ):
            return False
        self._absence.held.append(report)
        return True

    def due(self, *, at_once: bool) -> bool:
        """Whether the next controller is to take over now."""
        absence = self._absence
        return absence is not None and (at_once or self._hands.now_s() * 1e9 >= absence.until_ns)

    def take_over(self, asked: Collection[str]) -> list[Report]:
        """Start the next controller; returns the messages that arrived meanwhile. ``asked``:
        processes that were asked to end.
        """
        absence = self._absence
        assert absence is not None
        events = read_actor(self._log).events
        known = past(events, asked)
        self._absence = None
        self._access = RevocableHands(self._hands, self._before)
        self.controller = self._make(self._access)
        down_s = self._hands.now_s() - absence.since_ns / 1e9
        self._hands.record(
            Kind.COORDINATOR_ADOPTED,
            generation=known.generation,
            down_s=round(down_s, 6),
            events=len(events),
            members=list(known.members),
            stage=absence.stage,
        )
        self.supervise(lambda controller: controller.adopt(known, FIRST_STATE))
        return [report for report in absence.held if isinstance(report, MessageReceived)]


class CoordinatorLost(Exception):
    """The coordinator was lost, possibly in the middle of an act."""


class RevocableHands:
    """Implements ``recovery.supervise.supervision.Hands`` by delegating to ``hands`` until
    ``lost``; every call raises then.

    ``before``: called before each act with its name; tests lose the coordinator there.
    """

    def __init__(self, hands: Hands, before: Callable[[str], None] | None = None) -> None:
        self.lost = False
        self._hands = hands
        self._before = before

    def now_s(self) -> float:
        return self._hands.now_s()

    def spawn(self, role: str, mode: str) -> str:
        self._check("spawn")
        name = self._hands.spawn(role, mode)
        self._check()
        return name

    def expect(self, role: str, mode: str, count: int) -> None:
        self._hands.expect(role, mode, count)

    def send(self, process: str, message: Message) -> bool:
        self._check("send")
        sent = self._hands.send(process, message)
        self._check()
        return sent

    def kill(self, process: str) -> None:
        self._check("kill")
        self._hands.kill(process)
        self._check()

    def distrust(self, process: str) -> None:
        self._check()
        self._hands.distrust(process)

    def mark(self, process: str) -> Mark:
        return self._hands.mark(process)

    def os_state(self, process: str) -> str:
        return self._hands.os_state(process)

    def pulse(self, process: str) -> Pulse:
        return self._hands.pulse(process)

    def pid(self, process: str) -> int | None:
        return self._hands.pid(process)

    def ask_stacks(self, process: str) -> None:
        self._check()
        self._hands.ask_stacks(process)

    def stacks(self, process: str) -> tuple[str, str] | None:
        return self._hands.stacks(process)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> object:
        self._check("record")
        event = self._hands.record(kind, step=step, generation=generation, **data)
        self._check()
        return event

    def _check(self, act: str | None = None) -> None:
        if act is not None and self._before is not None and not self.lost:
            self._before(act)
        if self.lost:
            raise CoordinatorLost


@dataclass(kw_only=True)
class CoordinatorAbsence:
    """A time without a coordinator, by the arm's clock. ``stage``: the job's stage when it began;
    ``held``: reports that arrived meanwhile.
    """

    since_ns: int
    until_ns: int
    stage: str
    held: list[Report] = field(default_factory=list)
