"""The health source that monitors read: driver reports about devices, one JSON line each.

A driver's event is appended to the arm's file; a monitor reads the file from where it stopped.
Injected events (``health-event``) take the same path as NVML's, so that readers can tell them apart
only by ``source``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError


class HealthReport(BaseModel):
    """One report. ``what``: xid (``code`` is its number), ecc, thermal or nvlink (``code`` is a
    count or a value); ``device``: slot or CUDA device; ``node`` and ``rank``: its node and rank,
    where known; ``source``: nvml|injected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: Literal["xid", "ecc", "thermal", "nvlink"]
    code: int
    device: str | None = None
    node: int | None = None
    rank: int | None = None
    source: Literal["nvml", "injected"]


class HealthSource:
    """The report file of one arm, with the position of its reader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def append(self, reading: HealthReport) -> None:
        """Append a report, as a driver would. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as stream:
            stream.write(reading.model_dump_json().encode() + b"\n")

    def read(self) -> Iterator[HealthReport]:
        """Reports since the last call; malformed lines are skipped."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_size == self._offset:
                return
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValidationError):
                    yield HealthReport.model_validate_json(line)


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
