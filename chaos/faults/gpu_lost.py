"""Makes a GPU fall off the bus."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, Ends
from chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from chaos.fault.targets import ProcessTarget
from chaos.fault.witness import killed


class GpuLost(Fault):
    """XID 79: the process on the device is killed, and the device accepts no new process for the
    ``duration`` (without one, for the rest of the run). Emulated: the launcher refuses the device;
    on CPU a device is one of the emulated slots ``cpu:0``, ``cpu:1`` ..., one for each process the
    job starts with. The replacement starts on another device.

    Landed: the kernel reports the process ended by SIGKILL, which its supervisor had not sent
    before.
    """

    where: ClassVar[Where] = Where.PROCESS
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    may_last: ClassVar[bool] = True

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Refuse the device, then kill the process on it."""
        device = target.refuse_device()
        target.signal(signal.SIGKILL)
        return {"device": device, "xid": 79}

    def heal(self, target: ProcessTarget) -> None:
        """Accept processes again, as after replacing the device."""
        target.accept_device()

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(signal=signal.SIGKILL),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit status."""
        return killed(occurrence, events, signal.SIGKILL)
