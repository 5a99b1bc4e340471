"""One rank waits for its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event, Kind
from chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from chaos.fault.targets import RankTarget


class DataStall(Fault):
    """The data phase of each step takes ``delay_s`` longer, without a sign of life meanwhile.
    Emulated by sleeping.

    A crowded file server, a slow preprocessor. Shorter than the hang bound it only slows the job
    down; longer it is a hang of that rank. Landed: the job's own timing of the data phase grew by
    at least half of it, or the supervisor declared that rank hung.
    """

    where: ClassVar[Where] = Where.RANK
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data",)

    delay_s: float = Field(gt=0, le=3600)

    def point(self, phase: str) -> str:
        """Where data are loaded."""
        return "data"

    def shows_after_s(self) -> float:
        """A rank says how long its data took once they have come."""
        return self.delay_s

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Begin to stall."""
        target.set_data_delay(self.delay_s)
        return {"delay_s": self.delay_s}

    def heal(self, target: RankTarget) -> None:
        """Data come at once again."""
        target.set_data_delay(0.0)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The first step under it, and those before; or the supervisor's word that the
        rank hangs.
        """
        commits = [
            e for e in events if e.kind is Kind.STEP_COMMITTED and e.actor == occurrence.process
        ]
        before = [
            float(e.data["seconds"]["data"]) for e in commits if e.time_ns < occurrence.time_ns
        ]
        for event in (e for e in commits if e.time_ns > occurrence.time_ns):
            seconds = float(event.data["seconds"]["data"])
            if seconds >= min(before, default=0.0) + self.delay_s / 2:
                return Landed(
                    witness="job: phase times",
                    evidence={"data_s": seconds, "before_s": min(before, default=None)},
                )
        for event in events:
            mine = (
                event.kind is Kind.FAILURE_DETECTED and event.data["process"] == occurrence.process
            )
            if mine and event.data["cause"] == "hang" and event.time_ns > occurrence.time_ns:
                return Landed(
                    witness="supervisor: a rank that hangs",
                    evidence={"detail": event.data["detail"]},
                )
        return None
