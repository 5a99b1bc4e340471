"""A rank's device is in an error state for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, Ends
from chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from chaos.fault.targets import RankTarget
from chaos.fault.witness import raised_and_exited


class GpuError(Fault):
    """A sticky CUDA error, as after an illegal memory access: from now on every phase of training
    raises in this process, so that it must be replaced and never used again. Emulated, on CUDA too:
    a real one is provoked by a device assert, which under MPS would hit other users of the GPU.

    Landed: the process ended with an exit code, and logged the device's error last.
    """

    where: ClassVar[Where] = Where.RANK
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Break it."""
        return {"how": target.body.break_device()}

    def follows(self) -> tuple[Consequence, ...]:
        """Its end."""
        return (Ends(code=True),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit code, and the error the rank logged as its last word."""
        return raised_and_exited(occurrence, events, ("DeviceError",))
