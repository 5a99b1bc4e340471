"""A rank's interpreter is blocked as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, HangsUntilDeclared
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import RankTarget
from chaos.fault.witness import stuck


class GilDeadlock(Fault):
    """A C call on the training thread that waits without letting go of the interpreter's lock: no
    other thread of the rank runs either, so that it cannot even hear that its generation is
    aborted. Real.

    ``hold_s``: seconds until the call returns; nothing can heal it before, except the end of the
    process. Landed: the supervisor saw the rank's progress marks stand still, or the rank's own
    account shows a step that long.
    """

    where: ClassVar[Where] = Where.RANK

    hold_s: float = Field(default=60.0, gt=0, le=600, description="seconds the lock is held")

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Wait, holding the lock."""
        target.body.hold_interpreter(self.hold_s)
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
        """A hang blamed on the rank, or a step as long as the call."""
        return stuck(occurrence, events, self.hold_s)
