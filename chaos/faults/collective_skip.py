"""Makes a rank skip a collective, the classic deadlock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, HangsUntilDeclared, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import stuck

LONGEST_S = 600.0


class CollectiveSkip(Fault):
    """The rank skips the gradient all-reduce of its step and waits for the result, while all other
    ranks wait in the collective for this rank: a branch that only some ranks take. Real.

    It ends when the generation is aborted or the process ends. Landed: the supervisor saw the
    rank's progress marks, which count the collectives it has entered, stand still.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data", "forward")

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Skip the collective."""
        target.body.leave_out_collective()
        return {"left_out": "all-reduce", "step": target.step}

    def follows(self) -> tuple[Consequence, ...]:
        """No step until the hang is declared."""
        return (HangsUntilDeclared(),)

    def shows_after_s(self) -> float:
        """The fault is visible once a hang is declared, after about eight steps."""
        return LONGEST_S

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A declared hang that blames the rank."""
        return stuck(occurrence, events, None)
