"""What is asked of an NVIDIA device, as a table: metric, unit and the call of NVML.

Calls that take long are not here: nvmlDeviceGetPcieThroughput measures for 20 ms (NVML API
reference), so PCIe traffic is read from the counters of nvmlDeviceGetFieldValues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ALL_LINKS = 0xFFFF_FFFF
"""Scope of a field: the sum over a device's NVLinks (NVML API reference, field values)."""
KIB = 1024.0
SELDOM_S = 60.0

Values = Iterator[tuple[str, float, str]]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """``metric``: said of a failure; ``values``: (metric, value, unit) of a handle; ``seldom``:
    asked once in ``SELDOM_S``, as it changes little and takes a quarter of a millisecond (measured
    on an H200; others take a hundredth).
    """

    metric: str
    values: Callable[[Any, Any], Values]
    seldom: bool = False


@dataclass(frozen=True, kw_only=True)
class FieldAsk:
    """A value of nvmlDeviceGetFieldValues. ``constant``: name of its id; ``factor``: of its
    unit.
    """

    metric: str
    constant: str
    unit: str
    factor: float = 1.0
    scope: int | None = None


def _ecc(nvml: Any, handle: Any) -> Values:
    """Counters since the driver was loaded (volatile), and in the life of the device."""
    kinds = {
        "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    counters = {"volatile": nvml.NVML_VOLATILE_ECC, "aggregate": nvml.NVML_AGGREGATE_ECC}
    for counter, of in counters.items():
        for kind, error in kinds.items():
            count = nvml.nvmlDeviceGetTotalEccErrors(handle, error, of)
            yield f"ecc_{kind}_{counter}", float(count), "errors"


def _rows(nvml: Any, handle: Any) -> Values:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    yield "rows_remapped_corrected", float(corrected), "rows"
    yield "rows_remapped_uncorrected", float(uncorrected), "rows"
    yield "row_remap_pending", float(bool(pending)), "1"
    yield "row_remap_failed", float(bool(failed)), "1"


def _temperature(nvml: Any, handle: Any) -> Values:
    value = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    yield "temperature", float(value), "degC"


def _slowdown(nvml: Any, handle: Any) -> Values:
    which = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    value = nvml.nvmlDeviceGetTemperatureThreshold(handle, which)
    yield "temperature_slowdown", float(value), "degC"


def _shutdown(nvml: Any, handle: Any) -> Values:
    which = nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN
    value = nvml.nvmlDeviceGetTemperatureThreshold(handle, which)
    yield "temperature_shutdown", float(value), "degC"


def _power(nvml: Any, handle: Any) -> Values:
    yield "power", nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, "W"


def _power_limit(nvml: Any, handle: Any) -> Values:
    yield "power_limit", nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3, "W"


def _sm_clock(nvml: Any, handle: Any) -> Values:
    yield "clock_sm", float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), "MHz"


def _memory_clock(nvml: Any, handle: Any) -> Values:
    yield "clock_memory", float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)), "MHz"


def _throttle(nvml: Any, handle: Any) -> Values:
    """A mask, ``nvmlClocksEventReason...``; drivers before 535 have the older name only."""
    newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    ask = newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    yield "throttle_reasons", float(ask(handle)), "mask"


def _replays(nvml: Any, handle: Any) -> Values:
    yield "pcie_replays", float(nvml.nvmlDeviceGetPcieReplayCounter(handle)), "count"


def _utilisation(nvml: Any, handle: Any) -> Values:
    used = nvml.nvmlDeviceGetUtilizationRates(handle)
    yield "utilisation", float(used.gpu), "%"
    yield "utilisation_memory", float(used.memory), "%"


ASKS = (
    Ask(metric="temperature", values=_temperature),
    Ask(metric="temperature_slowdown", values=_slowdown, seldom=True),
    Ask(metric="temperature_shutdown", values=_shutdown, seldom=True),
    Ask(metric="power", values=_power),
    Ask(metric="power_limit", values=_power_limit, seldom=True),
    Ask(metric="clock_sm", values=_sm_clock),
    Ask(metric="clock_memory", values=_memory_clock),
    Ask(metric="throttle_reasons", values=_throttle),
    Ask(metric="utilisation", values=_utilisation),
    Ask(metric="ecc", values=_ecc),
    Ask(metric="rows", values=_rows),
    Ask(metric="pcie_replays", values=_replays, seldom=True),
)

_LINK = "NVML_FI_DEV_NVLINK_"
FIELDS = (
    FieldAsk(
        metric="nvlink_crc_flit", constant=f"{_LINK}CRC_FLIT_ERROR_COUNT_TOTAL", unit="errors"
    ),
    FieldAsk(
        metric="nvlink_crc_data", constant=f"{_LINK}CRC_DATA_ERROR_COUNT_TOTAL", unit="errors"
    ),
    FieldAsk(metric="nvlink_replay", constant=f"{_LINK}REPLAY_ERROR_COUNT_TOTAL", unit="errors"),
    FieldAsk(
        metric="nvlink_recovery", constant=f"{_LINK}RECOVERY_ERROR_COUNT_TOTAL", unit="errors"
    ),
    FieldAsk(
        metric="nvlink_sent",
        constant=f"{_LINK}THROUGHPUT_DATA_TX",
        unit="bytes",
        factor=KIB,
        scope=ALL_LINKS,
    ),
    FieldAsk(
        metric="nvlink_received",
        constant=f"{_LINK}THROUGHPUT_DATA_RX",
        unit="bytes",
        factor=KIB,
        scope=ALL_LINKS,
    ),
    FieldAsk(metric="pcie_sent", constant="NVML_FI_DEV_PCIE_COUNT_TX_BYTES", unit="bytes"),
    FieldAsk(metric="pcie_received", constant="NVML_FI_DEV_PCIE_COUNT_RX_BYTES", unit="bytes"),
)
RATES = {
    "nvlink_sent": "nvlink_bandwidth_out",
    "nvlink_received": "nvlink_bandwidth_in",
    "pcie_sent": "pcie_bandwidth_out",
    "pcie_received": "pcie_bandwidth_in",
}
"""Counter of bytes -> the metric of its rate since the last read, bytes/s."""
