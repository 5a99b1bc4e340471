"""A rank's device does not finish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from chaos.fault.base import Fidelity
from chaos.fault.hold import HoldsTraining
from chaos.fault.targets import RankTarget


class GpuHang(HoldsTraining):
    """A kernel that does not end: the training thread waits for it and hears nothing else, while
    the rank's other threads live. Real on CUDA (kernels that spin, each for at most a second); on
    CPU the thread sleeps.

    ``hold_s``: seconds until it goes on. Landed: the supervisor saw the rank's progress marks stand
    still, or the rank's own account shows a step that long.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    on_cuda: ClassVar[Fidelity | None] = Fidelity.REAL

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Hang."""
        target.body.block(self.hold_s)
        return {"held_s": self.hold_s}
