"""What NVIDIA devices say of themselves, through ``nvidia-ml-py``.

Nothing is raised: without the library or the driver, a problem is said once and there are no
readings. A metric that a device does not have, or that one may not read, is not asked again; a
device that is gone is not asked anything, and the others are.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainchaos.recovery.health.readings.reading import Place, Problem, Problems, Reading
from trainchaos.recovery.health.sources.nvml_metrics import ASKS, FIELDS, RATES, SELDOM_S, FieldAsk

RETRY_S = 60.0
"""Until a library or driver that was not there is tried again: somebody may install it, and a try
costs about a millisecond.
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


def load() -> Any:
    """The library. Raises ImportError."""
    return importlib.import_module("pynvml")


@dataclass(kw_only=True)
class _Device:
    index: int
    handle: Any
    where: Place
    dropped: set[str] = field(default_factory=set)
    counters: dict[str, tuple[float, float]] = field(default_factory=dict)
    gone: bool = False
    asked_s: float | None = None

    @property
    def name(self) -> str:
        return self.where.device or f"cuda:{self.index}"


class NvmlSource:
    """``library``: gives the module; ``ranks``: NVML's index -> rank, where known; ``node``: number
    of this machine; ``environ``: of the processes that use the devices, of which those that it
    hides are left out. A device is named as torch does; where that is not known, ``gpu:`` and its
    index. Metrics are in ``recovery.health.sources.nvml_metrics``; besides, ``xid`` (its
    number, one reading an event), ``ecc_double_bit`` and ``device_lost``.
    """

    name = "nvml"

    def __init__(
        self,
        library: Callable[[], Any] = load,
        *,
        node: int | None = None,
        ranks: Mapping[int, int] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._library, self._node, self._ranks = library, node, dict(ranks or {})
        self._environ = environ
        self._problems = Problems(self.name)
        self._nvml: Any = None
        self._events: Any = None
        self._devices: list[_Device] = []
        self._by_uuid: dict[Any, _Device] = {}
        self._tried_s: float | None = None

    def read(self, now_s: float) -> Sequence[Reading]:
        """Events since the last call, and each device's metrics."""
        if self._nvml is None and not self._open(now_s):
            return []
        found = self._take_events(now_s)
        for device in self._devices:
            if not device.gone:
                found += self._metrics(device, now_s)
            if not device.gone:
                found += self._fields(device, now_s)
            if device.gone:
                found.append(Reading(device.where, "device_lost", 1.0, "1", now_s))
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
        self._tried_s = now_s
        try:
            nvml = self._library()
        except (ImportError, OSError) as error:
            self._problems.note("library", "", error)
            return False
        try:
            nvml.nvmlInit()
            count = int(nvml.nvmlDeviceGetCount())
        except (nvml.NVMLError, OSError, AttributeError) as error:
            self._problems.note("driver", "", error)
            return False
        self._nvml = nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
        except (nvml.NVMLError, AttributeError) as error:
            self._problems.note("xid", "", error)
        there = [self._named(index) for index in range(count)]
        try:
            uuids, models = zip(*there, strict=True) if there else ((), ())
            names = cuda_names(uuids, models, self._environ)
        except LookupError as error:
            self._problems.note("names", "", error)
            names = {index: f"gpu:{index}" for index in range(count)}
        for index, name in names.items():
            self._admit(index, name)
        return True

    def _named(self, index: int) -> tuple[str, str]:
        """UUID and model, "" where they cannot be read."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            return str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle))
        except (nvml.NVMLError, AttributeError):  # said when the device is admitted
            return "", ""

    def _admit(self, index: int, name: str) -> None:
        nvml = self._nvml
        where = Place(rank=self._ranks.get(index), node=self._node, device=name)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except (nvml.NVMLError, AttributeError) as error:
            self._problems.note("", name, error)
            return
        device = _Device(index=index, handle=handle, where=where)
        self._devices.append(device)
        self._by_uuid[uuid] = device
        if self._events is not None:
            try:
                wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
                supported = nvml.nvmlDeviceGetSupportedEventTypes(handle)
                nvml.nvmlDeviceRegisterEvents(handle, wanted & supported, self._events)
            except (nvml.NVMLError, AttributeError) as error:
                self._failed(device, "xid", error)

    def _take_events(self, now_s: float) -> list[Reading]:
        nvml, found = self._nvml, list[Reading]()
        if self._events is None:
            return found
        for _ in range(MOST_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except (nvml.NVMLError, AttributeError) as error:
                if _name(error) != "Timeout":  # which says that there are no more
                    self._problems.note("xid", "", error)
                break
            try:
                device = self._by_uuid.get(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError:  # a device that has fallen off the bus has no name any more
                device = None
            where = device.where if device else Place(node=self._node)
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                found.append(Reading(where, "xid", float(event.eventData), "number", now_s))
            else:
                found.append(Reading(where, "ecc_double_bit", 1.0, "errors", now_s))
        return found

    def _metrics(self, device: _Device, now_s: float) -> list[Reading]:
        nvml, found = self._nvml, list[Reading]()
        all_s = device.asked_s
        everything = all_s is None or not 0 <= now_s - all_s < SELDOM_S
        if everything:
            device.asked_s = now_s
        for ask in ASKS:
            if ask.metric in device.dropped or (ask.seldom and not everything):
                continue
            try:
                for metric, value, unit in ask.values(nvml, device.handle):
                    found.append(Reading(device.where, metric, value, unit, now_s))
            except (nvml.NVMLError, AttributeError, TypeError, ValueError) as error:
                self._failed(device, ask.metric, error)
                if device.gone:
                    break
        return found

    def _fields(self, device: _Device, now_s: float) -> list[Reading]:
        """All in one call, of which each has a result of its own."""
        nvml, found = self._nvml, list[Reading]()
        asked = [one for one in FIELDS if one.metric not in device.dropped]
        asked = [one for one in asked if self._has(device, one)]
        if not asked:
            return found
        ids: list[Any] = []
        for one in asked:
            number = getattr(nvml, one.constant)
            ids.append(number if one.scope is None else (number, one.scope))
        try:
            values = nvml.nvmlDeviceGetFieldValues(device.handle, ids)
        except (nvml.NVMLError, AttributeError, TypeError) as error:
            self._failed(device, "fields", error)
            if "fields" in device.dropped:
                device.dropped |= {one.metric for one in asked}
            return found
        for one, value in zip(asked, values, strict=False):
            try:
                if value.nvmlReturn:
                    raise nvml.NVMLError(value.nvmlReturn)
                number = getattr(value.value, VALUE_OF[value.valueType])
                found.append(
                    Reading(device.where, one.metric, one.factor * number, one.unit, now_s)
                )
            except (nvml.NVMLError, AttributeError, TypeError, LookupError) as error:
                self._failed(device, one.metric, error)
                if device.gone:
                    return found
        return list(itertools.chain(found, self._rates(device, found)))

    def _has(self, device: _Device, one: FieldAsk) -> bool:
        """Whether this library knows the field."""
        if hasattr(self._nvml, one.constant):
            return True
        device.dropped.add(one.metric)
        self._problems.note(one.metric, device.name, f"this library has no {one.constant}")
        return False

    def _rates(self, device: _Device, counters: Sequence[Reading]) -> list[Reading]:
        found = []
        for reading in counters:
            rate = RATES.get(reading.metric)
            if rate is None:
                continue
            before = device.counters.get(reading.metric)
            device.counters[reading.metric] = reading.time_s, reading.value
            if before and reading.time_s > before[0] and reading.value >= before[1]:
                value = (reading.value - before[1]) / (reading.time_s - before[0])
                found.append(Reading(device.where, rate, value, "bytes/s", reading.time_s))
        return found

    def _is_there(self, device: _Device) -> bool:
        try:
            self._nvml.nvmlDeviceGetUUID(device.handle)
        except self._nvml.NVMLError:
            return False
        return True

    def _failed(self, device: _Device, metric: str, error: Exception) -> None:
        name = _name(error)
        if name == LOST or (name in UNKNOWN_DEVICE and not self._is_there(device)):
            device.gone = True
            self._problems.note("", device.name, error)
            return
        if name in REFUSED or not isinstance(error, self._nvml.NVMLError):
            device.dropped.add(metric)
        self._problems.note(metric, device.name, error)


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
        index = _index(word, uuids)
        if index is None or index in found:
            break
        found[index] = f"cuda:{len(found)}"
    return found


def _index(word: str, uuids: Sequence[str]) -> int | None:
    if word.isdigit():
        return int(word) if int(word) < len(uuids) else None
    if not word.startswith("GPU-"):
        return None
    alike = [i for i, uuid in enumerate(uuids) if uuid.startswith(word)]
    return alike[0] if len(alike) == 1 else None
