"""Makes a rank wait for a GPU kernel that does not end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trainchaos.chaos.fault.base import Fidelity
from trainchaos.chaos.fault.hold import HoldsTraining
from trainchaos.chaos.fault.targets import RankTarget


class GpuHang(HoldsTraining):
    """The training thread waits for a kernel that does not end and responds to nothing else, while
    the rank's other threads keep running. Real on CUDA (kernels that spin, each for at most a
    second); emulated on CPU, where the thread sleeps.

    ``hold_s``: seconds until training continues. Landed: the supervisor saw the rank's progress
    marks stand still, or the rank itself reported a step that long.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    on_cuda: ClassVar[Fidelity | None] = Fidelity.REAL

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Hang."""
        target.body.block(self.hold_s)
        return {"held_s": self.hold_s}
