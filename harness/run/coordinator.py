"""The coordinator of a job: a controller that can be lost, and successors that take over from the
log.

A loss takes the controller and all its state; the orchestrator around it (processes, injector,
event log) belongs to the test, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from trainchaos.chaos.events.log import Kind, read_actor
from trainchaos.harness.launch.launcher import MessageReceived, Report
from trainchaos.harness.run.revocable_hands import (
    CoordinatorAbsence,
    CoordinatorLost,
    RevocableHands,
)
from trainchaos.recovery.policy.strategy import StateFrom
from trainchaos.recovery.supervise.adoption import past
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.supervise.supervision import Hands
from trainchaos.recovery.transport.wire import Extra

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
