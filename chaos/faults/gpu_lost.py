"""Makes a GPU fall off the bus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trainchaos.chaos.fault.base import Fidelity
from trainchaos.chaos.fault.targets import ProcessTarget
from trainchaos.chaos.faults._kill import KillsProcess


class GpuLost(KillsProcess):
    """XID 79: the process on the device is killed, and the device accepts no new process for the
    ``duration`` (without one, for the rest of the run). Emulated: the launcher refuses the device;
    on CPU a device is one of the emulated slots ``cpu:0``, ``cpu:1`` ..., one for each process the
    job starts with. The replacement starts on another device.

    Landed: the kernel reports the process ended by SIGKILL, which its supervisor had not sent
    before.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    may_last: ClassVar[bool] = True

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Refuse the device, then kill the process on it."""
        device = target.refuse_device()
        super().act(target)
        return {"device": device, "xid": 79}

    def heal(self, target: ProcessTarget) -> None:
        """Accept processes again, as after replacing the device."""
        target.accept_device()
