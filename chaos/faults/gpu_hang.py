"""A rank's device does not finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, HangsUntilDeclared
from chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from chaos.fault.targets import RankTarget
from chaos.fault.witness import stuck


class GpuHang(Fault):
    """A kernel that does not end: the training thread waits for it and hears nothing else, while
    the rank's other threads live. Real on CUDA (kernels that spin, each for at most a second); on
    CPU the thread sleeps.

    ``hold_s``: seconds until it goes on. Landed: the supervisor saw the rank's progress marks stand
    still, or the rank's own account shows a step that long.
    """

    where: ClassVar[Where] = Where.RANK
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    on_cuda: ClassVar[Fidelity | None] = Fidelity.REAL

    hold_s: float = Field(default=60.0, gt=0, le=600, description="seconds it hangs")

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Hang."""
        target.body.block(self.hold_s)
        return {"held_s": self.hold_s}

    def follows(self) -> tuple[Consequence, ...]:
        """No step until the hang is declared."""
        return (HangsUntilDeclared(),)

    def shows_after_s(self) -> float:
        """It shows when somebody takes it for a hang, which takes as long as eight steps do, or
        when it is over.
        """
        return self.hold_s

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A hang blamed on the rank, or a step as long."""
        return stuck(occurrence, events, self.hold_s)
