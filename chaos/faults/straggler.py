"""A rank computes slowly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from chaos.events import Event, Kind
from chaos.fault import Fault, Fidelity, Landed, Occurrence, Where
from chaos.targets import RankTarget


class Straggler(Fault):
    """Stretches the rank's compute phases by a factor: a hot or degraded GPU. Emulated by sleeping.

    The phases are forward, backward and optimizer. ``factor``: how many times longer. Landed: the job's own
    phase times of that rank grew by at least half of what was asked.
    """

    where: ClassVar[Where] = Where.RANK
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    factor: float = Field(gt=1, le=100)

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Slow down."""
        target.set_slowdown(self.factor)
        return {"requested_factor": self.factor}

    def heal(self, target: RankTarget) -> None:
        """Full speed again."""
        target.set_slowdown(1.0)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Median compute time of the target's first three whole steps under the fault, and before."""
        commits = [e for e in events if e.kind is Kind.STEP_COMMITTED and e.actor == occurrence.process]
        before = [_compute_s(e) for e in commits if e.time_ns < occurrence.time_ns]
        during = [_compute_s(e) for e in commits if e.time_ns > occurrence.time_ns][1:4]
        if len(during) < 3 or not before:
            return None
        measured = median(during) / median(before)
        if measured < 1 + (self.factor - 1) / 2:
            return None
        return Landed(
            witness="job: phase times",
            evidence={"requested_factor": self.factor, "measured_factor": round(measured, 2)},
        )


def _compute_s(event: Event) -> float:
    seconds = event.data["seconds"]
    return float(seconds["forward"] + seconds["backward"])
