"""Places that are tainted for what was found there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trainchaos.recovery.health.care.alarm_taints import AlarmTaints
from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.health.readings.signs import HealthAlarm, Sign
from trainchaos.recovery.health.taints import TaintList

NOW = datetime(2026, 11, 26, 8, tzinfo=UTC)
XID = HealthReport(what="xid", code=79, node=0, device="cuda:1", source="nvml")
LOST = HealthAlarm(what="device-lost", device="cuda:1", value=1.0, threshold=0.0)


@pytest.fixture
def tainting(tmp_path: Path) -> Iterator[Callable[[], AlarmTaints]]:
    made: list[AlarmTaints] = []

    def make() -> AlarmTaints:
        made.append(AlarmTaints(TaintList(tmp_path / "taints.yaml"), now=lambda: NOW))
        return made[-1]

    yield make
    for each in made:
        each.close()


def listed(folder: Path) -> list[tuple[str, str]]:
    return [(each.place, each.by) for each in TaintList(folder / "taints.yaml").read()]


def test_a_place_that_announces_a_failure_is_tainted_once_with_the_evidence(
    tmp_path: Path, tainting: Callable[[], AlarmTaints]
) -> None:
    for _ in range(2):  # the second as another supervisor, which hears the same again
        taints = tainting()
        taints.heard(XID, "host-a", "cuda:1")
        taints.heard(XID, "host-a", "cuda:1")
        taints.close()
        assert taints.take() == [("host-a/cuda:1", "alarm", "")]
    (taint,) = TaintList(tmp_path / "taints.yaml").read()
    assert (taint.device, taint.by) == ("host-a/cuda:1", "alarm")
    assert taint.evidence == {"what": "xid", "code": 79} and taint.since == NOW
    assert taint.reason.startswith("XID 79: ")


@pytest.mark.parametrize(
    "sign",
    [
        XID.model_copy(update={"code": 94}),
        XID.model_copy(update={"source": "injected"}),
        LOST.model_copy(update={"what": "straggler"}),
        LOST.model_copy(update={"what": "thermal-limit"}),
    ],
)
def test_what_announces_nothing_or_was_injected_taints_nothing(
    tmp_path: Path, tainting: Callable[[], AlarmTaints], sign: Sign
) -> None:
    taints = tainting()
    taints.heard(sign, "host-a", "cuda:1")
    taints.close()
    assert taints.take() == [] and listed(tmp_path) == []


def test_a_host_is_tainted_for_what_names_no_device(
    tmp_path: Path, tainting: Callable[[], AlarmTaints]
) -> None:
    taints = tainting()
    taints.heard(LOST, "host-a", None)
    taints.taint("host-b", "cuda:0", "preflight: one\nword", {"said": "x"}, by="preflight")
    taints.close()
    assert listed(tmp_path) == [("host-a", "alarm"), ("host-b/cuda:0", "preflight")]


def test_nobody_waits_for_a_list_that_another_holds(
    tmp_path: Path, tainting: Callable[[], AlarmTaints]
) -> None:
    taints = tainting()
    taints.heard(LOST, "host-a", "cuda:1")
    taints.close()
    (lock,) = [path for path in tmp_path.iterdir() if "lock" in path.name]
    fd = os.open(lock, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    other = tainting()
    other.heard(LOST, "host-b", None)
    assert other.take() == []
    os.close(fd)
    other.close()
    assert other.take() == [("host-b", "alarm", "")]


def test_a_list_that_cannot_be_written_is_said(
    tmp_path: Path, tainting: Callable[[], AlarmTaints]
) -> None:
    (tmp_path / "taints.yaml").write_text("version: 1\ntaints: [3]\n")
    taints = tainting()
    taints.heard(LOST, "host-a", "cuda:1")
    taints.close()
    ((place, by, why),) = taints.take()
    assert (place, by) == ("host-a/cuda:1", "alarm") and "taint 1: Input should be" in why
