"""Events of NVML as the reports that monitors read (``recovery.health.readings.reports``)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from trainchaos.recovery.health.readings.reports import HealthReport


class NvmlEvents:
    """Critical XID and double-bit ECC events of this machine's NVIDIA devices. Raises NVMLError."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._set = pynvml.nvmlEventSetCreate()
        self._device: dict[str, str] = {}
        wanted = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._device[pynvml.nvmlDeviceGetUUID(handle)] = f"cuda:{index}"
            with contextlib.suppress(pynvml.NVMLError):  # some devices support neither
                pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)

    def read(self) -> Sequence[HealthReport]:
        """Events since the last call; does not wait."""
        nvml, found = self._nvml, list[HealthReport]()
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError:  # no more events: a timeout of 0
                return found
            device = self._device.get(nvml.nvmlDeviceGetUUID(event.device))
            xid = event.eventType == nvml.nvmlEventTypeXidCriticalError
            found.append(
                HealthReport(
                    what="xid" if xid else "ecc",
                    code=int(event.eventData),
                    device=device,
                    source="nvml",
                )
            )


def nvml_events() -> NvmlEvents | None:
    """Events of NVML; None without a driver or a device."""
    import pynvml

    try:
        return NvmlEvents()
    except (pynvml.NVMLError, OSError):
        return None
