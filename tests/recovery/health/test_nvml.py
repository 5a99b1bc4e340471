"""The source of NVIDIA devices, with a module in the place of the library; and on a real device."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.gpu.fake_nvml import FIELD_IDS, FakeNvml, error
from trainchaos.recovery.health.readings.reading import Reading
from trainchaos.recovery.health.sources.nvml import MOST_EVENTS, RETRY_S, NvmlSource
from trainchaos.recovery.health.sources.nvml_metrics import ASKS, FIELDS, SELDOM_S

SENT = FIELD_IDS["NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"]


def of(readings: Any, metric: str) -> dict[str | None, float]:
    """Device -> value of a metric."""
    return {one.where.device: one.value for one in readings if one.metric == metric}


def event(nvml: FakeNvml, device: int, kind: int, data: int) -> Any:
    """As NVML gives it."""
    return SimpleNamespace(device=nvml.devices[device], eventType=kind, eventData=data)


def test_each_device_says_what_it_has_in_its_unit() -> None:
    nvml = FakeNvml()
    source = NvmlSource(lambda: nvml, node=2, ranks={0: 4, 1: 5})
    nvml.devices[1].answers["nvmlDeviceGetRemappedRows"] = (3, 1, 1, 1)
    found = source.read(10.0)
    assert source.problems() == []
    assert of(found, "power") == {"cuda:0": 312.0, "cuda:1": 312.0}
    assert of(found, "temperature_slowdown") == {"cuda:0": 87.0, "cuda:1": 87.0}
    assert of(found, "row_remap_failed") == {"cuda:0": 0.0, "cuda:1": 1.0}
    assert of(found, "row_remap_pending") == {"cuda:0": 0.0, "cuda:1": 1.0}
    assert of(found, "throttle_reasons") == {"cuda:0": 4.0, "cuda:1": 4.0}
    assert {one.where.rank for one in found} == {4, 5}
    assert {one.where.node for one in found} == {2}
    assert {one.time_s for one in found} == {10.0}
    kinds = {one.metric for one in found}
    ecc = {f"ecc_{a}_{b}" for a in ("corrected", "uncorrected") for b in ("volatile", "aggregate")}
    assert kinds >= {one.metric for one in FIELDS} | ecc | {"utilisation", "clock_sm"}


def test_rates_are_made_of_counters_that_grow() -> None:
    nvml = FakeNvml(1)
    source = NvmlSource(lambda: nvml)
    rates = []
    for now_s, kib in ((0.0, 0), (2.0, 4096), (3.0, 4096), (4.0, 10), (5.0, 20)):
        nvml.devices[0].fields[SENT] = kib
        rates.append(of(source.read(now_s), "nvlink_bandwidth_out").get("cuda:0"))
    assert rates == [None, 4096 * 1024 / 2.0, 0.0, None, 10 * 1024.0]


def test_what_changes_little_is_asked_seldom() -> None:
    nvml = FakeNvml(1)
    source = NvmlSource(lambda: nvml)
    seldom = {one.metric for one in ASKS if one.seldom}
    said = []
    for now_s in (0.0, 1.0, SELDOM_S - 1.0, SELDOM_S, SELDOM_S + 1.0, 5.0, 6.0):
        said.append(seldom & {one.metric for one in source.read(now_s)})
    # At 5.0 the clock had been set back.
    assert said == [seldom, set(), set(), seldom, set(), seldom, set()]


def test_events_are_taken_until_there_are_none() -> None:
    nvml = FakeNvml()
    source = NvmlSource(lambda: nvml)
    nvml.events = [event(nvml, 1, 8, 79), event(nvml, 0, 2, 0)]
    found = source.read(0.0)
    assert of(found, "xid") == {"cuda:1": 79.0}
    assert of(found, "ecc_double_bit") == {"cuda:0": 1.0}
    nvml.events = [event(nvml, 0, 8, 13)] * (3 * MOST_EVENTS)
    assert len([one for one in source.read(1.0) if one.metric == "xid"]) == MOST_EVENTS
    nvml.events = [error("Unknown")] * 3
    assert "xid" not in {one.metric for one in [*source.read(2.0), *source.read(3.0)]}
    assert [(one.metric, one.why.split(":")[0]) for one in source.problems()] == [
        ("xid", "NVMLError_Unknown")
    ]


@pytest.mark.parametrize("why", [ImportError("no module named pynvml"), OSError("no such file")])
def test_without_the_library_it_is_said_once_and_tried_again_later(why: Exception) -> None:
    tries = []

    def library() -> Any:
        tries.append(1)
        raise why

    source = NvmlSource(library)
    for now_s in (0.0, 1.0, 2.0):
        assert source.read(now_s) == []
    (problem,) = source.problems()
    assert (problem.source, problem.metric, problem.device) == ("nvml", "library", "")
    assert len(tries) == 1
    assert source.read(RETRY_S + 1.0) == []
    assert (source.problems(), len(tries)) == ([], 2)


@pytest.mark.parametrize("name", ["DriverNotLoaded", "LibraryNotFound", "Unknown"])
def test_without_a_driver_it_is_said_once_and_one_that_comes_is_used(name: str) -> None:
    nvml = FakeNvml()
    nvml.init = error(name)
    source = NvmlSource(lambda: nvml)
    assert [source.read(0.0), source.read(1.0)] == [[], []]
    assert [one.metric for one in source.problems()] == ["driver"]
    nvml.init = None
    assert source.read(2.0) == []
    assert of(source.read(RETRY_S), "power")


@pytest.mark.parametrize("name", ["NoPermission", "NotSupported", "FunctionNotFound"])
@pytest.mark.parametrize("ask", [one.metric for one in ASKS])
def test_what_a_device_does_not_answer_is_asked_and_said_once(ask: str, name: str) -> None:
    calls = {
        "temperature": "nvmlDeviceGetTemperature",
        "temperature_slowdown": "nvmlDeviceGetTemperatureThreshold",
        "temperature_shutdown": "nvmlDeviceGetTemperatureThreshold",
        "power": "nvmlDeviceGetPowerUsage",
        "power_limit": "nvmlDeviceGetEnforcedPowerLimit",
        "clock_sm": "nvmlDeviceGetClockInfo",
        "clock_memory": "nvmlDeviceGetClockInfo",
        "throttle_reasons": "nvmlDeviceGetCurrentClocksEventReasons",
        "utilisation": "nvmlDeviceGetUtilizationRates",
        "ecc": "nvmlDeviceGetTotalEccErrors",
        "rows": "nvmlDeviceGetRemappedRows",
        "pcie_replays": "nvmlDeviceGetPcieReplayCounter",
    }
    nvml = FakeNvml()
    nvml.devices[0].answers[calls[ask]] = error(name)
    source = NvmlSource(lambda: nvml)
    first, second = source.read(0.0), source.read(SELDOM_S)
    problems = source.problems()
    assert (ask, "cuda:0") in {(one.metric, one.device) for one in problems}
    assert len(problems) == len({one[:3] for one in problems}) <= 2
    assert source.problems() == []
    others = {one.metric for one in second if one.where.device == "cuda:1"}
    lacking = others - {one.metric for one in second if one.where.device == "cuda:0"}
    assert 1 <= len(lacking) <= 4
    assert len(first) == len(second) - 8, "the second has rates"
    asked = [one for one in nvml.calls if one == f"{calls[ask]} 0"]
    assert len(asked) == len(problems)


def test_an_error_that_may_pass_is_said_once_and_asked_again() -> None:
    nvml = FakeNvml(1)
    source = NvmlSource(lambda: nvml)
    nvml.devices[0].answers["nvmlDeviceGetPowerUsage"] = error("Unknown")
    assert not of(source.read(0.0), "power")
    assert not of(source.read(1.0), "power")
    assert [one.metric for one in source.problems()] == ["power"]
    del nvml.devices[0].answers["nvmlDeviceGetPowerUsage"]
    assert of(source.read(2.0), "power") == {"cuda:0": 312.0}


@pytest.mark.parametrize("name", ["GpuIsLost", "NotFound"])
def test_a_device_that_is_lost_is_said_once_and_the_others_go_on(name: str) -> None:
    nvml = FakeNvml(3)
    source = NvmlSource(lambda: nvml)
    source.read(0.0)
    nvml.devices[1].lost = error(name)
    for now_s in (1.0, 2.0, 3.0):
        found = source.read(now_s)
        assert of(found, "power").keys() == {"cuda:0", "cuda:2"}
        assert of(found, "device_lost") == {"cuda:1": 1.0}
    assert [(one.metric, one.device) for one in source.problems()] == [("", "cuda:1")]
    assert source.problems() == []
    asked = nvml.calls.count("nvmlDeviceGetTemperature 1")
    assert asked == 2, "before it was lost, and when"


@pytest.mark.parametrize("at", range(1, 22))
def test_a_device_may_vanish_at_any_call(at: int) -> None:
    nvml = FakeNvml(2)
    source = NvmlSource(lambda: nvml)
    source.read(0.0)
    count = [0]

    def lose(usual: Any) -> Any:
        def call(handle: Any, *rest: Any) -> Any:
            if handle.index == 0:
                count[0] += 1
                if count[0] >= at:
                    handle.lost = error("GpuIsLost")
            return usual(handle, *rest)

        return call

    for name in [one for one in vars(nvml) if one.startswith("nvmlDeviceGet")]:
        setattr(nvml, name, lose(getattr(nvml, name)))
    nvml.nvmlDeviceGetFieldValues = lose(nvml.nvmlDeviceGetFieldValues)  # type: ignore[method-assign]
    for now_s in (1.0, 2.0, 3.0):
        found = source.read(now_s)
        assert of(found, "power")["cuda:1"] == 312.0
    assert of(found, "device_lost") == {"cuda:0": 1.0}
    assert [(one.metric, one.device) for one in source.problems()] == [("", "cuda:0")]


def test_not_found_of_a_metric_is_not_the_loss_of_a_device() -> None:
    nvml = FakeNvml(1)
    nvml.devices[0].answers["nvmlDeviceGetRemappedRows"] = error("NotFound")
    source = NvmlSource(lambda: nvml)
    assert not of(source.read(0.0), "device_lost")
    assert [one.metric for one in source.problems()] == ["rows"]


def test_a_device_that_cannot_be_opened_does_not_hide_the_others() -> None:
    nvml = FakeNvml(2)
    nvml.devices[0].answers["nvmlDeviceGetHandleByIndex"] = error("NoPermission")
    nvml.devices[1].answers["nvmlDeviceRegisterEvents"] = error("NotSupported")
    source = NvmlSource(lambda: nvml)
    assert of(source.read(0.0), "power") == {"gpu:1": 312.0}, "CUDA may count from the second"
    assert {(one.metric, one.device) for one in source.problems()} == {
        ("names", ""),
        ("", "gpu:0"),
        ("xid", "gpu:1"),
    }


def test_a_field_that_is_refused_is_dropped_and_the_others_are_read() -> None:
    nvml = FakeNvml(1)
    nvml.devices[0].fields[SENT] = error("NotSupported")
    del nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES  # type: ignore[attr-defined]
    source = NvmlSource(lambda: nvml)
    metrics = {one.metric for one in [*source.read(0.0), *source.read(1.0)]}
    assert not metrics & {"nvlink_sent", "pcie_received"}
    assert metrics >= {"nvlink_received", "nvlink_replay", "pcie_sent"}
    assert sorted(one.metric for one in source.problems()) == ["nvlink_sent", "pcie_received"]


def test_an_older_library_without_a_call() -> None:
    nvml = FakeNvml(1)
    del nvml.nvmlDeviceGetRemappedRows  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = (  # type: ignore[attr-defined]
        nvml.nvmlDeviceGetCurrentClocksEventReasons  # type: ignore[attr-defined]
    )
    del nvml.nvmlDeviceGetCurrentClocksEventReasons  # type: ignore[attr-defined]
    source = NvmlSource(lambda: nvml)
    assert of(source.read(0.0), "throttle_reasons") == {"cuda:0": 4.0}
    assert [one.metric for one in source.problems()] == ["rows"]


def test_it_lets_go_of_the_library() -> None:
    nvml = FakeNvml()
    source = NvmlSource(lambda: nvml)
    source.close()
    source.read(0.0)
    source.close()
    source.close()
    assert nvml.released == 2


def test_the_library_that_is_there_names_all_that_is_asked() -> None:
    pynvml = importlib.import_module("pynvml")
    assert [one.constant for one in FIELDS if not hasattr(pynvml, one.constant)] == []
    made = NvmlSource()
    for reading in made.read(0.0):  # none without a driver
        assert isinstance(reading, Reading)
    assert len(made.problems()) >= 0
    made.close()


@pytest.mark.gpu
def test_a_real_device() -> None:
    source = NvmlSource()
    found = [*source.read(0.0), *source.read(1.0)]
    problems = source.problems()
    if not found:
        pytest.skip(f"no NVIDIA device: {problems[0].why if problems else 'none is listed'}")
    began_s = time.perf_counter()
    source.read(2.0)
    took_ms = 1e3 * (time.perf_counter() - began_s)
    devices = {one.where.device for one in found}
    print(f"{len(devices)} devices, {took_ms:.2f} ms a read")
    for one in found:
        print(f"{one.where.device} {one.metric} {one.value:g} {one.unit}")
    print(*problems, sep="\n")
    assert 0.0 < min(of(found, "temperature").values()) < 120.0
    assert 0.0 < min(of(found, "power").values()) < 2000.0
    assert not of(found, "device_lost")
    assert len({one[:3] for one in problems}) == len(problems)
    assert source.problems() == []
    source.close()
