"""The coordinator of the job is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event, Kind
from chaos.fault.aftermath import Consequence, NobodyDecides
from chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from chaos.fault.targets import CoordinatorTarget


class CoordinatorKill(Fault):
    """Whoever supervises the job forgets everything at once, in the middle of what it does.
    Emulated.

    The supervisor's state is thrown away and its hands taken from it, inside the harness's process:
    messages, exits and hangs are noticed by nobody for ``down_s`` seconds. Then another supervisor
    takes the job over, knowing nothing but the event log and what the ranks answer. Landed: the
    takeover, and the steps that ranks' own logs show from the time between.
    """

    where: ClassVar[Where] = Where.COORDINATOR
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.COORDINATOR_PROCESS})
    harmless: ClassVar[bool] = True

    down_s: float = Field(default=1.0, ge=0, le=60)

    def act(self, target: CoordinatorTarget) -> Mapping[str, Any]:
        """Lose it."""
        target.kill(self.down_s)
        return {"requested_down_s": self.down_s}

    def follows(self) -> tuple[Consequence, ...]:
        """Nobody decides anything."""
        return (NobodyDecides(),)

    def shows_after_s(self) -> float:
        """The takeover shows it."""
        return self.down_s

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The takeover's own line in the log, and the ranks'."""
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
