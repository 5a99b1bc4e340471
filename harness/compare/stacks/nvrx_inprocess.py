"""NVIDIA Resiliency Extension, in-process restart: the training function is called again in the
ranks that are left.
"""

from __future__ import annotations

from typing import ClassVar

from trainchaos.harness.compare.environments.stack import Way
from trainchaos.harness.compare.stacks._nvrx import Inprocess


class NvrxInprocess(Inprocess):
    """``inprocess.Wrapper`` around the training loop; ranks started directly, since torchrun would
    end them all.
    """

    title: ClassVar[str] = "NVIDIA Resiliency Extension 0.4.1, in-process"
    way: ClassVar[Way] = "shrink"

    def fidelity(self) -> tuple[str, ...]:
        return (
            *super().fidelity(),
            (
                "a rank that is lost is not replaced: no reserve rank (nvrx-inprocess-spare has"
                " one), no launcher around"
            ),
        )
