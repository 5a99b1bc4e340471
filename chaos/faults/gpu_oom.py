"""Makes a rank's device run out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Ends, Occurrence
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import raised_and_exited


class GpuOom(Fault):
    """torch.OutOfMemoryError on the training thread: a longer sequence, fragmentation, a neighbour
    on the GPU. Real on CUDA (an allocation larger than the device fails); on CPU the exception is
    raised without an allocation.

    Landed: the process ended with a nonzero exit code, and this error is the last one it logged.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    on_cuda: ClassVar[Fidelity | None] = Fidelity.REAL

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Allocate too much."""
        target.body.exhaust_device()
        return {"asked": "more than there is"}

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(code=True),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit code, and the last error the rank logged."""
        return raised_and_exited(occurrence, events, ("OutOfMemoryError",))
