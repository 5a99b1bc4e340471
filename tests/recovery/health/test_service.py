"""The service: what becomes of readings, on its own thread and without one."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S
from trainchaos.recovery.health.detector import Alarm, Detector
from trainchaos.recovery.health.nvml import cuda_names
from trainchaos.recovery.health.readings import Place, Problem, Reading
from trainchaos.recovery.health.service import MOST_WAITING, HealthService, machine_service
from trainchaos.recovery.health.signs import HealthAlarm, HealthReport, ReportFile, Sign

HERE = Place(node=1, device="cuda:3")


class Told:
    """A source that says what a test gives it, once; and a detector that alarms of ``alarms``."""

    name = "told"
    what = "told"
    rate = 0.01

    def __init__(self, *readings: Reading | Sign, alarms: Sequence[Alarm] = ()) -> None:
        self.readings, self.alarms = list(readings), list(alarms)
        self.closed = False
        self.gate: threading.Event | None = None

    def read(self, now_s: float) -> Sequence[Reading | Sign]:
        """What there is."""
        if self.gate is not None:
            self.gate.wait(LIMIT_S)
        found, self.readings = self.readings, []
        return found

    def problems(self) -> Sequence[Problem]:
        """None."""
        return []

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """What there is."""
        found, self.alarms = self.alarms, []
        return found

    def close(self) -> None:
        """Note it."""
        self.closed = True


def once(*readings: Reading | Sign, alarms: Sequence[Alarm] = ()) -> HealthService:
    """A service that has looked once at these."""
    told = Told(*readings, alarms=alarms)
    detectors: list[Detector] = [told]
    service = HealthService([told], detectors, clock_s=lambda: 100.0)
    service.look()
    return service


XID = HealthReport(what="xid", code=48, source="nvml")


def test_sources_are_read_once_in_a_period_and_one_that_raises_stops_no_other() -> None:
    now_s, told = 0.0, Told()
    broken = Told()
    broken.name = "broken"
    broken.read = lambda now_s: 1 / 0  # type: ignore[method-assign,assignment]
    service = HealthService([broken, told], [], period_s=2.0, clock_s=lambda: now_s)
    found = []
    for at_s in (0.0, 0.5, 1.9, 2.0, 2.1, 1.0, 1.5, 3.0):
        now_s = at_s
        told.readings.append(XID)
        service.look()
        found.append(len(service.take()))
    # At 1.0 the clock had been set back: a read is due, and the next 2 s later.
    assert found == [1, 0, 0, 3, 0, 2, 0, 2]
    (problem,) = service.problems()
    assert (problem.metric, problem.why) == ("broken", "ZeroDivisionError: division by zero")


def test_an_alarm_can_be_written_down_whatever_its_numbers_are() -> None:
    wild = Alarm(
        what="thermal-limit",
        where=HERE,
        since_s=40.0,
        value=math.inf,
        threshold=math.nan,
        evidence={"slope": -math.inf, "said": "much", "n": 3},
    )
    (alarm,) = once(alarms=[wild]).take()
    assert isinstance(alarm, HealthAlarm) and alarm.lasted_s == 60.0
    text = alarm.model_dump_json()
    assert HealthAlarm.model_validate_json(text) == alarm
    assert math.isfinite(json.loads(text)["value"]) and alarm.threshold == 0.0
    assert alarm.evidence == {"slope": -1e308, "said": "much", "n": 3}


def test_what_nobody_takes_is_bounded() -> None:
    service = once(*[XID.model_copy(update={"code": i}) for i in range(MOST_WAITING + 5)])
    assert "the newest are dropped" in str(service.problems()[0])
    found = service.take()
    assert len(found) == MOST_WAITING
    assert isinstance(found[-1], HealthReport) and found[-1].code == MOST_WAITING - 1


def test_a_thread_reads_wakes_whoever_waits_and_releases_its_sources() -> None:
    woken, told = threading.Event(), Told(XID)
    service = HealthService([told], [], period_s=0.01, notify=woken.set)
    service.start()
    assert woken.wait(LIMIT_S)
    assert service.take() == [XID]
    service.close()
    service.close()
    assert told.closed


def test_a_source_that_never_answers_holds_up_nobody() -> None:
    told = Told(XID)
    told.gate = threading.Event()
    service = HealthService([told], [])
    service.start()
    assert service.take() == []
    told.gate.set()
    service.close()


def test_without_a_source_there_is_no_thread() -> None:
    before = threading.active_count()
    service = machine_service(["cpu"])
    service.start()
    assert threading.active_count() == before
    service.close()


def test_what_monitors_append_to_a_file_is_found(tmp_path: Path) -> None:
    woken, path = threading.Event(), tmp_path / "reports.jsonl"
    ReportFile(path).append(HealthReport(what="xid", code=48, source="nvml"))  # of yesterday
    service = machine_service(["cpu"], reports=path, notify=woken.set)
    report = HealthReport(what="xid", code=79, device="cuda:0", source="nvml")
    ReportFile(path).append(report)
    service.start()
    try:
        assert woken.wait(LIMIT_S) and service.take() == [report]
    finally:
        service.close()


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, {0: "cuda:0", 1: "cuda:1", 2: "cuda:2"}),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, {2: "cuda:0", 0: "cuda:1"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, {1: "cuda:0"}),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, {1: "cuda:0"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, {1: "cuda:0"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, {}),
    ],
)
def test_devices_are_called_what_torch_calls_them(
    environ: dict[str, str], names: dict[int, str]
) -> None:
    uuids = ["GPU-a1", "GPU-b2", "GPU-c3"]
    assert cuda_names(uuids, ["H100"] * 3, environ) == names


def test_a_device_is_not_guessed() -> None:
    mixed = ["H100", "A100"]
    with pytest.raises(LookupError, match="CUDA_DEVICE_ORDER"):
        cuda_names(["GPU-a", "GPU-b"], mixed, {})
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cuda_names(["GPU-a", "GPU-b"], mixed, by_bus) == {0: "cuda:0", 1: "cuda:1"}
    assert cuda_names(["GPU-a", ""], mixed, {"CUDA_VISIBLE_DEVICES": "GPU-a"}) == {0: "cuda:0"}
    with pytest.raises(LookupError, match="cannot be read"):
        cuda_names(["GPU-a", ""], ["H100", ""], {})
    with pytest.raises(LookupError, match="MIG"):
        cuda_names(["GPU-a"], ["H100"], {"CUDA_VISIBLE_DEVICES": "MIG-a"})
