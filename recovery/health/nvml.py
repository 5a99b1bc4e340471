"""What NVIDIA devices say of themselves, through ``nvidia-ml-py``.

Nothing is raised: without the library or the driver, a problem is said once and there are no
readings. A metric that a device does not have, or that one may not read, is not asked again; a
device that is gone is not asked anything, and the others are.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trainchaos.recovery.health.readings import Place, Problem, Problems, Reading
from trainchaos.recovery.health.signs import HealthAlarm, HealthReport, Sign

RETRY_S = 60.0
"""Until a library or driver that was not there is tried again: somebody may install it, and a try
costs about a millisecond.
"""
SELDOM_S = 60.0
"""Between two looks at a limit, which changes little and takes a quarter of a millisecond (measured
on an H200; others take a hundredth).
"""
MOST_EVENTS = 64
"""Taken from the event set in one read; a device that floods it does not hold up the others."""
LOST = "GpuIsLost"
UNKNOWN_DEVICE = ("NotFound", "GpuNotFound")
"""Of a device that is not there any more, or of a metric that it does not have."""
REFUSED = (
    *UNKNOWN_DEVICE,
    "NotSupported",
    "NoPermission",
    "FunctionNotFound",
    "InvalidArgument",
    "NoData",
)
"""Of a metric: it will be the same the next time."""
VALUE_OF = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of a field's union, by its type (nvmlValueType_t, from 0)."""
BY_BUS = "PCI_BUS_ID"
SENT = "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"
ALL_LINKS = 0xFFFF_FFFF
"""Scope of a field: the sum over a device's NVLinks (NVML API reference, field values)."""
KIB = 1024.0

Values = Iterator[tuple[str, float, str]]
"""Metric, value and unit."""


def load() -> Any:
    """The library. Raises ImportError."""
    return importlib.import_module("pynvml")


def _temperature(nvml: Any, handle: Any) -> Values:
    value = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    yield "temperature", float(value), "degC"


def _slowdown(nvml: Any, handle: Any) -> Values:
    which = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    value = nvml.nvmlDeviceGetTemperatureThreshold(handle, which)
    yield "temperature_slowdown", float(value), "degC"


def _utilisation(nvml: Any, handle: Any) -> Values:
    yield "utilisation", float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), "%"


def _ecc(nvml: Any, handle: Any) -> Values:
    """Counters since the driver was loaded."""
    for kind in ("corrected", "uncorrected"):
        error = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}")
        count = nvml.nvmlDeviceGetTotalEccErrors(handle, error, nvml.NVML_VOLATILE_ECC)
        yield f"ecc_{kind}_volatile", float(count), "errors"


def _rows(nvml: Any, handle: Any) -> Values:
    *_, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    yield "row_remap_failed", float(bool(failed)), "1"


def _sent(nvml: Any, handle: Any) -> Values:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [(getattr(nvml, SENT), ALL_LINKS)])
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    yield "nvlink_sent", KIB * getattr(value.value, VALUE_OF[value.valueType]), "bytes"


ASKS: Mapping[str, Callable[[Any, Any], Values]] = {
    "temperature": _temperature,
    "temperature_slowdown": _slowdown,
    "utilisation": _utilisation,
    "ecc": _ecc,
    "rows": _rows,
    "nvlink": _sent,
}
"""What the detectors of devices look at. Calls that take long are not here."""
SELDOM = "temperature_slowdown"


@dataclass(kw_only=True)
class _Device:
    handle: Any
    where: Place
    dropped: set[str] = field(default_factory=set)
    sent: tuple[float, float] | None = None  # when, bytes
    asked_s: float | None = None

    @property
    def name(self) -> str:
        return self.where.device or ""


class NvmlSource:
    """``library``: gives the module; ``environ``: of the processes that use the devices, of which
    those that it hides are left out. A device is named as torch does; where that is not known,
    ``gpu:`` and its index. A driver's events, XIDs and double-bit errors, are reports, and the loss
    of a device is an alarm, said once.
    """

    name = "nvml"

    def __init__(
        self, library: Callable[[], Any] = load, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._library, self._environ = library, environ
        self._problems = Problems(self.name)
        self._nvml: Any = None
        self._events: Any = None
        self._devices: dict[str, _Device] = {}  # by UUID
        self._tried_s: float | None = None

    def read(self, now_s: float) -> Sequence[Reading | Sign]:
        """Events since the last call, and each device's metrics."""
        if self._nvml is None and not self._open(now_s):
            return []
        found: list[Reading | Sign] = [*self._take_events(now_s)]
        for uuid, device in [*self._devices.items()]:
            try:
                found += self._metrics(device, now_s)
            except _Gone as error:
                del self._devices[uuid]
                self._problems.note("", device.name, error.__cause__)
                where = device.where._asdict()
                found.append(HealthAlarm(what="device-lost", **where, value=1.0, threshold=0.0))
        return found

    def problems(self) -> Sequence[Problem]:
        """New problems."""
        return self._problems.take()

    def close(self) -> None:
        """Release the library."""
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            for release in (lambda: nvml.nvmlEventSetFree(self._events), nvml.nvmlShutdown):
                try:
                    release()
                except (nvml.NVMLError, AttributeError, TypeError) as error:
                    self._problems.note("close", "", error)

    def _open(self, now_s: float) -> bool:
        if self._tried_s is not None and 0 <= now_s - self._tried_s < RETRY_S:
            return False
        self._tried_s, what = now_s, "library"
        try:
            nvml = self._library()
            what = "driver"
            nvml.nvmlInit()
            count = int(nvml.nvmlDeviceGetCount())
        except Exception as error:  # ImportError, OSError, or an error of the library's own
            self._problems.note(what, "", error)
            return False
        self._nvml = nvml
        self._events = self._asked("xid", "", nvml.nvmlEventSetCreate)
        handles = {
            index: handle
            for index in range(count)
            if (handle := self._asked("", f"gpu:{index}", nvml.nvmlDeviceGetHandleByIndex, index))
            is not None
        }
        uuids, models = (
            [
                str(self._asked("", f"gpu:{index}", ask, handles[index]) or "")
                if index in handles
                else ""
                for index in range(count)
            ]
            for ask in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName)
        )
        try:
            names = cuda_names(uuids, models, self._environ)
        except LookupError as error:
            self._problems.note("names", "", error)
            names = {index: f"gpu:{index}" for index in handles}
        for index, name in names.items():
            device = _Device(handle=handles[index], where=Place(device=name))
            self._devices[uuids[index]] = device
            if self._events is not None:
                self._asked("xid", name, self._register, device.handle)
        return True

    def _asked(self, metric: str, device: str, ask: Callable[..., Any], *given: Any) -> Any:
        try:
            return ask(*given)
        except (self._nvml.NVMLError, AttributeError) as error:
            self._problems.note(metric, device, error)
            return None

    def _register(self, handle: Any) -> None:
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        supported = nvml.nvmlDeviceGetSupportedEventTypes(handle)
        nvml.nvmlDeviceRegisterEvents(handle, wanted & supported, self._events)

    def _take_events(self, now_s: float) -> Iterator[Reading | Sign]:
        nvml = self._nvml
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except (nvml.NVMLError, AttributeError) as error:
                if _name(error) != "Timeout":  # which says that there are no more
                    self._problems.note("xid", "", error)
                return
            try:
                device = self._devices.get(str(nvml.nvmlDeviceGetUUID(event.device)))
            except nvml.NVMLError:  # a device that has fallen off the bus has no name any more
                device = None
            where = device.where if device else Place()
            report = partial(HealthReport, **where._asdict(), source="nvml")
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                yield report(what="xid", code=int(event.eventData))
            else:
                yield report(what="ecc", code=1)
                yield Reading(where, "ecc_double_bit", 1.0, "errors", now_s)

    def _metrics(self, device: _Device, now_s: float) -> Iterator[Reading]:
        """Raises _Gone, after what was read before."""
        nvml, all_s = self._nvml, device.asked_s
        everything = all_s is None or not 0 <= now_s - all_s < SELDOM_S
        device.asked_s = now_s if everything else all_s
        for ask, values in ASKS.items():
            if ask in device.dropped or (ask == SELDOM and not everything):
                continue
            try:
                for metric, value, unit in values(nvml, device.handle):
                    if metric != "nvlink_sent":
                        yield Reading(device.where, metric, value, unit, now_s)
                        continue
                    before, device.sent = device.sent, (now_s, value)
                    if before and now_s > before[0] and value >= before[1]:
                        rate = (value - before[1]) / (now_s - before[0])
                        yield Reading(device.where, "nvlink_bandwidth_out", rate, "bytes/s", now_s)
            except (nvml.NVMLError, AttributeError, TypeError, ValueError, LookupError) as error:
                self._failed(device, ask, error)

    def _failed(self, device: _Device, metric: str, error: Exception) -> None:
        """Raises _Gone."""
        name, nvml = _name(error), self._nvml
        gone = name == LOST
        if name in UNKNOWN_DEVICE:
            try:
                nvml.nvmlDeviceGetUUID(device.handle)
            except nvml.NVMLError:
                gone = True
        if gone:
            raise _Gone from error
        if name in REFUSED or not isinstance(error, nvml.NVMLError):
            device.dropped.add(metric)
        self._problems.note(metric, device.name, error)


class _Gone(Exception):
    """The device is not there any more."""


def _name(error: Exception) -> str:
    return type(error).__name__.removeprefix("NVMLError_")


def cuda_names(
    uuids: Sequence[str], models: Sequence[str], environ: Mapping[str, str]
) -> dict[int, str]:
    """NVML's index -> torch's name, such as ``cuda:0``, of each visible device: NVML counts in the
    order of the PCI bus, CUDA as ``CUDA_VISIBLE_DEVICES`` says, and by default puts faster models
    first (CUDA C++ Programming Guide, environment variables). ``uuids``,
    ``models``: of all devices, in NVML's order. As in CUDA, the first word that names no device
    ends the list. Raises LookupError where the environment does not say which device is which.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    numbered = len(set(models)) <= 1 or environ.get("CUDA_DEVICE_ORDER") == BY_BUS
    words = [str(i) for i in range(len(uuids))] if visible is None else visible.split(",")
    found: dict[int, str] = {}
    for word in map(str.strip, words):
        if word.startswith("MIG"):
            raise LookupError(f"{word} is a part of a device, which NVML counts in another way")
        if word.isdigit() and not all(uuids):
            raise LookupError("a device cannot be read, and CUDA may not count it")
        if word.isdigit() and not numbered:
            raise LookupError(f"models differ: set CUDA_DEVICE_ORDER={BY_BUS}")
        by_uuid = word.startswith("GPU-")
        alike = [i for i, uuid in enumerate(uuids) if uuid.startswith(word) and by_uuid]
        if word.isdigit():
            alike = [i for i in range(len(uuids)) if i == int(word)]
        if len(alike) != 1 or alike[0] in found:
            break
        found[alike[0]] = f"cuda:{len(found)}"
    return found
