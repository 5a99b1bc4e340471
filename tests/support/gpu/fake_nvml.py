"""A module in the place of ``pynvml``: the calls that the source makes, of devices whose answers a
test sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

FIELD_IDS = {"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": 138}


class NVMLError(Exception):
    """As in the library: a class for each number."""

    def __new__(cls, value: int = 999) -> NVMLError:
        """The number's class."""
        kind = CLASSES.get(value, cls) if cls is NVMLError else cls
        return Exception.__new__(kind, value)


def _error(name: str, value: int) -> type[NVMLError]:
    return type(f"NVMLError_{name}", (NVMLError,), {"value": value})


CLASSES = {
    2: _error("InvalidArgument", 2),
    3: _error("NotSupported", 3),
    4: _error("NoPermission", 4),
    6: _error("NotFound", 6),
    9: _error("DriverNotLoaded", 9),
    10: _error("Timeout", 10),
    12: _error("LibraryNotFound", 12),
    13: _error("FunctionNotFound", 13),
    15: _error("GpuIsLost", 15),
    999: _error("Unknown", 999),
}


def error(name: str) -> NVMLError:
    """The error of that name."""
    return next(kind() for kind in CLASSES.values() if kind.__name__ == f"NVMLError_{name}")


@dataclass
class FakeDevice:
    """``answers``: call -> its result, or an error that it raises; ``fields``: id -> value, or the
    name of an error; ``lost``: every call says so.
    """

    index: int
    answers: dict[str, Any] = field(default_factory=dict)
    fields: dict[int, Any] = field(default_factory=dict)
    lost: NVMLError | None = None

    def __hash__(self) -> int:
        return self.index


class FakeNvml:
    """The module. ``calls``: names, in order."""

    def __init__(self, count: int = 2) -> None:
        self.NVMLError = NVMLError
        self.devices = [FakeDevice(index) for index in range(count)]
        self.events: list[Any] = []
        self.init: NVMLError | None = None
        self.calls: list[str] = []
        self.released = 0
        names = {
            "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
            "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
            "NVML_VOLATILE_ECC": 0,
            "NVML_TEMPERATURE_GPU": 0,
            "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": 1,
            "nvmlEventTypeXidCriticalError": 8,
            "nvmlEventTypeDoubleBitEccError": 2,
            **FIELD_IDS,
        }
        for name, value in names.items():
            setattr(self, name, value)
        results: dict[str, Any] = {
            "nvmlDeviceGetName": "Fake",
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (1, 0, 0, 0),
            "nvmlDeviceGetTemperature": 54,
            "nvmlDeviceGetTemperatureThreshold": 87,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
            "nvmlDeviceGetSupportedEventTypes": 8 | 2,
            "nvmlDeviceRegisterEvents": None,
        }
        for name, result in results.items():
            setattr(self, name, self._of_device(name, result))

    def _of_device(self, name: str, usual: Any) -> Callable[..., Any]:
        def call(handle: FakeDevice, *_: Any) -> Any:
            self.calls.append(f"{name} {handle.index}")
            if handle.lost is not None:
                raise handle.lost
            answer = handle.answers.get(name, usual)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def nvmlInit(self) -> None:
        """Raises what a test set."""
        self.calls.append("nvmlInit")
        if self.init is not None:
            raise self.init

    def nvmlShutdown(self) -> None:
        """Count."""
        self.released += 1

    def nvmlDeviceGetCount(self) -> int:
        """How many."""
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        """The device itself."""
        answer = self.devices[index].answers.get("nvmlDeviceGetHandleByIndex")
        if isinstance(answer, Exception):
            raise answer
        return self.devices[index]

    def nvmlDeviceGetUUID(self, handle: FakeDevice) -> str:
        """Its name."""
        if handle.lost is not None:
            raise handle.lost
        return f"GPU-{handle.index}"

    def nvmlEventSetCreate(self) -> str:
        """A set."""
        return "set"

    def nvmlEventSetFree(self, _: str) -> None:
        """Count."""
        self.released += 1

    def nvmlEventSetWait_v2(self, _: str, timeout_ms: int) -> Any:
        """The next event; never waits."""
        assert timeout_ms == 0
        if not self.events:
            raise error("Timeout")
        event = self.events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    def nvmlDeviceGetFieldValues(self, handle: FakeDevice, ids: list[Any]) -> list[Any]:
        """A value for each id: unsigned, of 64 bits."""
        self.calls.append(f"fields {handle.index}")
        if handle.lost is not None:
            raise handle.lost
        found = []
        for one in ids:
            number = one[0] if isinstance(one, tuple) else one
            value = handle.fields.get(number, 0)
            failed = value.value if isinstance(value, NVMLError) else 0  # type: ignore[attr-defined]
            held = SimpleNamespace(ullVal=0 if failed else value)
            found.append(SimpleNamespace(nvmlReturn=failed, valueType=3, value=held))
        return found
