"""A rank's interpreter is blocked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from chaos.fault.hold import HoldsTraining
from chaos.fault.targets import RankTarget


class GilDeadlock(HoldsTraining):
    """A C call on the training thread that waits without letting go of the interpreter's lock: no
    other thread of the rank runs either, so that it cannot even hear that its generation is
    aborted. Real.

    ``hold_s``: seconds until the call returns; nothing can heal it before, except the end of the
    process. Landed: the supervisor saw the rank's progress marks stand still, or the rank's own
    account shows a step that long.
    """

    hold_s: float = Field(default=60.0, gt=0, le=600, description="seconds the lock is held")

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Wait, holding the lock."""
        target.body.hold_interpreter(self.hold_s)
        return {"held_s": self.hold_s}
