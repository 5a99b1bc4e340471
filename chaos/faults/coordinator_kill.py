"""Loses the job's coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import Consequence, NothingDecided, Occurrence
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Where
from trainchaos.chaos.fault.targets import CoordinatorTarget


class CoordinatorKill(Fault):
    """The job's supervisor is lost with all its state, whatever it is doing. Emulated.

    Inside the harness process, the supervisor's state is discarded and its access to the job
    revoked: messages, exits and hangs go unnoticed for ``down_s`` seconds. Then another supervisor
    takes over, knowing only the event log and the ranks' answers. Landed: the log records the
    takeover, and the ranks' own logs show the steps of the time between.
    """

    where: ClassVar[Where] = Where.COORDINATOR
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.COORDINATOR_PROCESS})
    harmless: ClassVar[bool] = True

    down_s: float = Field(default=1.0, ge=0, le=60)

    def act(self, target: CoordinatorTarget) -> Mapping[str, Any]:
        """Lose the supervisor."""
        target.kill(self.down_s)
        return {"requested_down_s": self.down_s}

    def follows(self) -> tuple[Consequence, ...]:
        """Nothing is decided until the takeover."""
        return (NothingDecided(),)

    def shows_after_s(self) -> float:
        """The time until the takeover, which makes the loss visible."""
        return self.down_s

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The takeover event, and the ranks' steps until then."""
        for event in events:
            if event.kind is Kind.COORDINATOR_ADOPTED and event.time_ns > occurrence.time_ns:
                between = [e for e in events if occurrence.time_ns < e.time_ns < event.time_ns]
                steps = {e.step for e in between if e.kind is Kind.STEP_COMMITTED}
                evidence = {
                    "measured_down_s": event.data["down_s"],
                    "log_lines_read": event.data["events"],
                    "steps_committed_meanwhile": len(steps),
                }
                return Landed(witness="log: takeover and ranks", evidence=evidence)
        return None
