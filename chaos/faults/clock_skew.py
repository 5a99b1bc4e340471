"""Shifts a rank's wall clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import effects

TOLERANCE_S = 0.25


class ClockSkew(Fault):
    """The wall clock seen by a rank's code jumps: a bad time server, a migrated virtual machine.
    Emulated.

    ``time.time`` and ``time.time_ns`` are shifted by ``offset_s`` in the rank (``direction``: ahead
    or back); the monotonic clock is unaffected. Nothing in the stack may depend on wall time.
    Landed: wall time elapsed since the first line of the rank's log differs from monotonic time
    elapsed by the offset.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True
    beside_steps: ClassVar[bool] = True

    offset_s: float = Field(gt=0, le=1e9)
    direction: Literal["ahead", "back"] = "ahead"

    @property
    def _wanted_s(self) -> float:
        return -self.offset_s if self.direction == "back" else self.offset_s

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Shift the clock, then read it."""
        target.signs.set_wall_offset(self._wanted_s)
        return {"requested_offset_s": self._wanted_s, "wall_ns": target.signs.wall_ns()}

    def heal(self, target: RankTarget) -> None:
        """Restore the true time."""
        target.signs.set_wall_offset(0)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Compares wall and monotonic time of the log's first line with those under the fault."""
        own = [e for e in events if e.actor == occurrence.process]
        first = next((e for e in own if e.kind is Kind.ACTOR_STARTED), None)
        if first is None:
            return None
        for event, seen in effects(occurrence, own):
            if "wall_ns" not in seen:
                continue
            passed_ns = event.time_ns - first.time_ns
            jumped_s = (seen["wall_ns"] - first.data["wall_ns"] - passed_ns) / 1e9
            if abs(jumped_s - self._wanted_s) <= min(TOLERANCE_S, self.offset_s / 2):
                evidence = {
                    "requested_offset_s": self._wanted_s,
                    "measured_offset_s": round(jumped_s, 3),
                }
                return Landed(witness="rank: wall against monotonic clock", evidence=evidence)
        return None
