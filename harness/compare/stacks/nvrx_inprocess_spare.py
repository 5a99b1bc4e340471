"""NVIDIA Resiliency Extension, in-process restart with a reserve rank that takes the place of a
lost one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import CommonJob, Way
from trainchaos.harness.compare.stacks._nvrx import Inprocess


class NvrxInprocessSpare(Inprocess):
    """As ``nvrx-inprocess``, with one extra rank that waits in reserve inside the wrapper.

    The wrapper's ``rank_assignment`` is ``Compose(MaxActiveWorldSize(ranks), FillGaps())``: the
    reserve rank takes the number of the lost rank, and the others keep theirs.
    """

    title: ClassVar[str] = "NVIDIA Resiliency Extension 0.4.1, in-process with a reserve rank"
    way: ClassVar[Way] = "spare"
    spares: ClassVar[int] = 1

    def chosen(self) -> Mapping[str, object]:
        return {
            **super().chosen(),
            "Wrapper(rank_assignment)": "Compose(MaxActiveWorldSize(ranks), FillGaps())",
        }

    def provisioned(self, job: CommonJob) -> int:
        """The job's ranks plus the reserve rank."""
        return job.ranks + self.spares
