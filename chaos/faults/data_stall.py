"""Stalls one rank's data loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import commits_timed


class DataStall(Fault):
    """The data phase of each step takes ``delay_s`` longer, without a heartbeat meanwhile. Emulated
    by sleeping.

    Imitates a busy file server or slow preprocessing. A delay below the hang timeout only slows the
    job down; a longer one counts as a hang of that rank. Landed: the job's own data phase time grew
    by at least half of ``delay_s``, or the supervisor declared that rank hung.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data",)

    delay_s: float = Field(gt=0, le=3600)

    def point(self, phase: str) -> str:
        """The phase that loads data."""
        return "data"

    def shows_after_s(self) -> float:
        """The delay: a rank reports its data phase time only after the data arrived."""
        return self.delay_s

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Start delaying."""
        target.set_data_delay(self.delay_s)
        return {"delay_s": self.delay_s}

    def heal(self, target: RankTarget) -> None:
        """Stop delaying."""
        target.set_data_delay(0.0)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Compares the first step under the fault with those before; or a declared hang of the
        rank.
        """
        commits = commits_timed(events, occurrence.process, "data")
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
