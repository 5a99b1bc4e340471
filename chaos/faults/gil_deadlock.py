"""Blocks a rank's whole Python interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trainchaos.chaos.fault.hold import HoldsTraining
from trainchaos.chaos.fault.targets import RankTarget


class GilDeadlock(HoldsTraining):
    """A C call on the training thread waits without releasing the GIL: no other thread of the rank
    runs, so the rank cannot even receive the abort of its generation. Real.

    ``hold_s``: seconds until the call returns; only the end of the process ends it earlier. Landed:
    the supervisor saw the rank's progress marks stand still, or the rank itself reported a step
    that long.
    """

    hold_s: float = Field(default=60.0, gt=0, le=600, description="seconds the lock is held")

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Wait while holding the GIL."""
        target.body.hold_interpreter(self.hold_s)
        return {"held_s": self.hold_s}
