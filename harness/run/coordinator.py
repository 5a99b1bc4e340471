"""Whoever supervises the job: a controller that can be lost, and another that takes over from the
log.

What is lost is the controller and all it knew; the orchestrator around it (processes, injector,
event log) is the test's, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from chaos.events.log import Kind, read_actor
from harness.launch.launcher import Report, Said
from harness.run.revocable_hands import Absence, CoordinatorLost, Grip
from recovery.policy.strategy import StateFrom
from recovery.supervise.adoption import past
from recovery.supervise.controller import Controller
from recovery.supervise.supervision import Hands
from recovery.transport.wire import Extra

Make = Callable[[Hands], Controller]
FIRST_STATE = StateFrom.INITIAL  # an arm has a checkpoint directory of its own, which is empty


class Coordinator:
    """``controller`` is the present one, or the one that was lost last. ``before``: see
    ``Grip``.
    """

    def __init__(
        self, make: Make, hands: Hands, log: Path, before: Callable[[str], None] | None = None
    ) -> None:
        self._make = make
        self._hands = hands
        self._log = log
        self._before = before
        self._absence: Absence | None = None
        self._grip = Grip(hands, before)
        self.controller = make(self._grip)

    @property
    def there(self) -> bool:
        """Whether somebody supervises the job now."""
        return self._absence is None

    def start(self) -> None:
        """Begin the job."""
        self.supervise(lambda controller: controller.start(FIRST_STATE))

    def supervise(self, act: Callable[[Controller], None]) -> None:
        """Let it do something, if it is there; it may be lost in the middle of that."""
        if self._absence is None:
            try:
                act(self.controller)
            except CoordinatorLost:
                pass

    def lose(self, down_s: float) -> None:
        """It forgets everything, and can do nothing any more, in the middle of whatever it does."""
        now_ns = int(self._hands.now_s() * 1e9)
        self._grip.lost = True
        self._absence = Absence(
            since_ns=now_ns, until_ns=now_ns + int(down_s * 1e9), stage=self.controller.stage.value
        )

    def misses(self, report: Report) -> bool:
        """Whether nobody hears it now; messages are kept for the next one, exits are in the log."""
        if self._absence is None or (
            isinstance(report, Said) and isinstance(report.message, Extra)
        ):
            return False
        self._absence.held.append(report)
        return True

    def due(self, *, at_once: bool) -> bool:
        """Whether another one is to take over now."""
        absence = self._absence
        return absence is not None and (at_once or self._hands.now_s() * 1e9 >= absence.until_ns)

    def take_over(self, asked: Collection[str]) -> list[Report]:
        """Another one takes over. Returns what nobody heard meanwhile. ``asked``: who was sent its
        end.
        """
        absence = self._absence
        assert absence is not None
        events = read_actor(self._log).events
        known = past(events, asked)
        self._absence = None
        self._grip = Grip(self._hands, self._before)
        self.controller = self._make(self._grip)
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
        return [report for report in absence.held if isinstance(report, Said)]
