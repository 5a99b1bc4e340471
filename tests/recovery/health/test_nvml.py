"""The source of NVIDIA devices, with a module in the place of the library; and on a real device."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.gpu.fake_nvml import FIELD_IDS, FakeNvml, error
from trainchaos.recovery.health.nvml import MOST_EVENTS, RETRY_S, SELDOM, SELDOM_S, NvmlSource
from trainchaos.recovery.health.nvml import SENT as SENT_FIELD
from trainchaos.recovery.health.readings import Reading
from trainchaos.recovery.health.signs import HealthAlarm, HealthReport

SENT = FIELD_IDS[SENT_FIELD]


def of(readings: Any, metric: str) -> dict[str | None, float]:
    """Device -> value of a metric."""
    readings = [one for one in readings if isinstance(one, Reading)]
    return {one.where.device: one.value for one in readings if one.metric == metric}


def event(nvml: FakeNvml, device: int, kind: int, data: int) -> Any:
    """As NVML gives it."""
    return SimpleNamespace(device=nvml.devices[device], eventType=kind, eventData=data)


def test_each_device_says_what_it_has_in_its_unit() -> None:
    nvml = FakeNvml()
    source = NvmlSource(lambda: nvml)
    nvml.devices[1].answers["nvmlDeviceGetRemappedRows"] = (3, 1, 1, 1)
    found = [*source.read(10.0), *source.read(11.0)]
    assert source.problems() == []
    assert of(found, "temperature_slowdown") == {"cuda:0": 87.0, "cuda:1": 87.0}
    assert of(found, "row_remap_failed") == {"cuda:0": 0.0, "cuda:1": 1.0}
    assert {one.metric for one in found if isinstance(one, Reading)} == {
        "temperature",
        "temperature_slowdown",
        "utilisation",
        "ecc_corrected_volatile",
        "ecc_uncorrected_volatile",
        "row_remap_failed",
        "nvlink_bandwidth_out",
    }


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
    times = (0.0, 1.0, SELDOM_S - 1.0, SELDOM_S, SELDOM_S + 1.0, 5.0, 6.0)
    said = [bool(of(source.read(now_s), SELDOM)) for now_s in times]
    # At 5.0 the clock had been set back.
    assert said == [True, False, False, True, False, True, False]


def test_events_are_taken_until_there_are_none() -> None:
    nvml = FakeNvml()
    source = NvmlSource(lambda: nvml)
    nvml.events = [event(nvml, 1, 8, 79), event(nvml, 0, 2, 0)]
    found = source.read(0.0)
    assert [one for one in found if isinstance(one, HealthReport)] == [
        HealthReport(what="xid", code=79, device="cuda:1", source="nvml"),
        HealthReport(what="ecc", code=1, device="cuda:0", source="nvml"),
    ]
    assert of(found, "ecc_double_bit") == {"cuda:0": 1.0}
    nvml.events = [event(nvml, 0, 8, 13)] * (3 * MOST_EVENTS)
    assert sum(isinstance(one, HealthReport) for one in source.read(1.0)) == MOST_EVENTS
    nvml.events = [error("Unknown")] * 3
    both = [*source.read(2.0), *source.read(3.0)]
    assert not any(isinstance(one, HealthReport) for one in both)
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
    assert of(source.read(RETRY_S), "temperature")


CALLS = {
    "temperature": "nvmlDeviceGetTemperature",
    "temperature_slowdown": "nvmlDeviceGetTemperatureThreshold",
    "utilisation": "nvmlDeviceGetUtilizationRates",
    "ecc": "nvmlDeviceGetTotalEccErrors",
    "rows": "nvmlDeviceGetRemappedRows",
}


@pytest.mark.parametrize("name", ["NoPermission", "NotSupported", "FunctionNotFound"])
@pytest.mark.parametrize("ask", CALLS)
def test_what_a_device_does_not_answer_is_asked_and_said_once(ask: str, name: str) -> None:
    nvml = FakeNvml()
    nvml.devices[0].answers[CALLS[ask]] = error(name)
    source = NvmlSource(lambda: nvml)
    source.read(0.0)
    second = source.read(SELDOM_S)
    assert [(one.metric, one.device) for one in source.problems()] == [(ask, "cuda:0")]
    read = {"cuda:0": set[str](), "cuda:1": set[str]()}
    for one in second:
        assert isinstance(one, Reading)
        read[str(one.where.device)].add(one.metric)
    assert 1 <= len(read["cuda:1"] - read["cuda:0"]) <= 2
    assert nvml.calls.count(f"{CALLS[ask]} 0") == 1


def test_an_error_that_may_pass_is_said_once_and_asked_again() -> None:
    nvml = FakeNvml(1)
    source = NvmlSource(lambda: nvml)
    nvml.devices[0].answers["nvmlDeviceGetTemperature"] = error("Unknown")
    assert not of(source.read(0.0), "temperature")
    assert not of(source.read(1.0), "temperature")
    assert [one.metric for one in source.problems()] == ["temperature"]
    del nvml.devices[0].answers["nvmlDeviceGetTemperature"]
    assert of(source.read(2.0), "temperature").keys() == {"cuda:0"}


LOST = HealthAlarm(what="device-lost", device="cuda:1", value=1.0, threshold=0.0)


@pytest.mark.parametrize("name", ["GpuIsLost", "NotFound"])
def test_a_device_that_is_lost_is_said_once_and_the_others_go_on(name: str) -> None:
    nvml = FakeNvml(3)
    source = NvmlSource(lambda: nvml)
    source.read(0.0)
    nvml.devices[1].lost = error(name)
    for now_s in (1.0, 2.0, 3.0):
        found = source.read(now_s)
        assert of(found, "temperature").keys() == {"cuda:0", "cuda:2"}
        assert (LOST in found) is (now_s == 1.0)
    assert [(one.metric, one.device) for one in source.problems()] == [("", "cuda:1")]
    assert source.problems() == []
    asked = nvml.calls.count("nvmlDeviceGetTemperature 1")
    assert asked == 2, "before it was lost, and when"


@pytest.mark.parametrize("at", range(1, 7))
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
    lost: list[HealthAlarm] = []
    for now_s in (1.0, 2.0, 3.0):
        found = source.read(now_s)
        assert "cuda:1" in of(found, "temperature")
        lost += [one for one in found if isinstance(one, HealthAlarm)]
    assert lost == [LOST.model_copy(update={"device": "cuda:0"})]
    assert [(one.metric, one.device) for one in source.problems()] == [("", "cuda:0")]


def test_not_found_of_a_metric_is_not_the_loss_of_a_device() -> None:
    nvml = FakeNvml(1)
    nvml.devices[0].answers["nvmlDeviceGetRemappedRows"] = error("NotFound")
    source = NvmlSource(lambda: nvml)
    assert not any(isinstance(one, HealthAlarm) for one in source.read(0.0))
    assert [one.metric for one in source.problems()] == ["rows"]


def test_a_device_that_cannot_be_opened_does_not_hide_the_others() -> None:
    nvml = FakeNvml(2)
    nvml.devices[0].answers["nvmlDeviceGetHandleByIndex"] = error("NoPermission")
    nvml.devices[1].answers["nvmlDeviceRegisterEvents"] = error("NotSupported")
    source = NvmlSource(lambda: nvml)
    assert of(source.read(0.0), "temperature").keys() == {"gpu:1"}, "CUDA may count from the second"
    assert {(one.metric, one.device) for one in source.problems()} == {
        ("names", ""),
        ("", "gpu:0"),
        ("xid", "gpu:1"),
    }


def test_a_library_or_device_without_a_call() -> None:
    nvml = FakeNvml(1)
    del nvml.nvmlDeviceGetRemappedRows  # type: ignore[attr-defined]
    nvml.devices[0].fields[SENT] = error("NotSupported")
    source = NvmlSource(lambda: nvml)
    both = [*source.read(0.0), *source.read(1.0)]
    assert not of(both, "nvlink_bandwidth_out") and of(both, "utilisation")
    assert [one.metric for one in source.problems()] == ["rows", "nvlink"]


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
    assert hasattr(pynvml, SENT_FIELD)
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
    assert len({one[:3] for one in problems}) == len(problems)
    assert source.problems() == []
    source.close()
