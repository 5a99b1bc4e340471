"""Base class of faults that block a rank's training thread for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, HangsUntilDeclared, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.witness import stuck


class HoldsTraining(Fault):
    """The training thread is blocked for ``hold_s`` seconds; only the end of the process ends it
    earlier.

    Landed: the supervisor saw the rank's progress marks stand still, or the rank itself reported a
    step that long.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True

    hold_s: float = Field(default=60.0, gt=0, le=600, description="seconds it hangs")

    def follows(self) -> tuple[Consequence, ...]:
        """No step until the hang is declared."""
        return (HangsUntilDeclared(),)

    def shows_after_s(self) -> float:
        """The whole hold: it becomes visible when a hang is declared, after about eight steps, or
        when the hold is over.
        """
        return self.hold_s

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A declared hang that blames the rank, or a step that long."""
        return stuck(occurrence, events, self.hold_s)
