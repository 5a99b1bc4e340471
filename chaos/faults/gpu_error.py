"""Puts a rank's device into a permanent error state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Ends, Occurrence
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import raised_and_exited


class GpuError(Fault):
    """A sticky CUDA error, as after an illegal memory access: every training phase raises in this
    process from now on, so the process must be replaced. Emulated, on CUDA too: a real one takes a
    device assert, which under MPS would hit other users of the GPU.

    Landed: the process ended with a nonzero exit code, and the device error is the last one it
    logged.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Break the device."""
        return {"how": target.body.break_device()}

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(code=True),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit code, and the last error the rank logged."""
        return raised_and_exited(occurrence, events, ("DeviceError",))
