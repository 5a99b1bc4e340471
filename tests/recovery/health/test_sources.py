"""The sources of a job, a host and a driver's reports."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainchaos.recovery.health.readings.reading import (
    MOST_PROBLEMS,
    MOST_WORDS,
    Place,
    Problems,
    Reading,
)
from trainchaos.recovery.health.readings.reports import MOST_BYTES, HealthReport, ReportFile
from trainchaos.recovery.health.sources.host import HostSource
from trainchaos.recovery.health.sources.job import JobSource
from trainchaos.recovery.health.sources.reported import ReportedSource
from trainchaos.recovery.transport.progress_counters import NEVER

STEP = {
    "rank": 3,
    "samples": 8,
    "loss": 0.5,
    "grad_norm": 2.0,
    "seconds": {"data": 0.1, "forward": 0.2, "backward": 0.3, "collective": 0.4, "optimizer": 0.5},
}


def values(readings: Any) -> dict[str, float]:
    """Metric -> its last value."""
    return {one.metric: one.value for one in readings}


def test_a_step_says_what_the_rank_did_itself_and_what_it_waited_for() -> None:
    job = JobSource()
    job.committed(STEP, 1, 10.0)
    job.committed(STEP, 2, 12.0)
    found = job.read(13.0)
    assert {one.where for one in found} == {Place(3)}
    assert values(found) == pytest.approx(
        {
            "committed": 2.0,
            "compute": 1.0,
            "collective": 0.4,
            "data_wait": 0.1,
            "loss": 0.5,
            "gradient_norm": 2.0,
            "throughput": 4.0,
        }
    )
    assert job.read(14.0) == []
    assert job.problems() == []


def test_a_step_that_is_done_again_has_no_throughput() -> None:
    job = JobSource()
    for step, time_s in ((1, 1.0), (2, 2.0), (2, 3.0), (5, 4.0), (6, 4.0), (7, 3.0)):
        job.committed(STEP, step, time_s)
    assert [one.value for one in job.read(9.0) if one.metric == "throughput"] == [8.0]


def test_what_is_missing_or_no_number_is_said_once_for_each_rank() -> None:
    job = JobSource()
    odd: list[dict[str, Any]] = [
        {**STEP, "loss": None, "grad_norm": "much", "seconds": None},
        {**STEP, "loss": True},
        {"rank": None},
        {"rank": True},
        {},
    ]
    for data in odd * 3:
        job.committed(data, 1, 1.0)
    said = [(one.metric, one.device) for one in job.problems()]
    assert len(said) == len(set(said))
    assert {("loss", "rank 3"), ("grad_norm", "rank 3"), ("committed", "")} <= set(said)
    assert job.problems() == []
    job.committed({**STEP, "loss": 10**400}, 1, 1.0)
    assert math.isinf(values(job.read(1.0))["loss"])


def test_a_mark_says_how_far_a_rank_is_and_since_when() -> None:
    job = JobSource()
    job.marked(1, NEVER)
    (reading,) = job.read(5.0)
    assert reading == Reading(Place(1), "committed", 0.0, "steps", 0.0, 0)


def test_what_nobody_reads_is_held_in_bounded_memory() -> None:
    job = JobSource(most=1000)
    for i in range(20_000):
        job.feed(None, "loss", float(i), "1", float(i))
    assert [one.value for one in job.read(0.0)] == [float(i) for i in range(19_000, 20_000)]
    assert [one.metric for one in job.problems()] == ["dropped"]


@pytest.fixture
def host(tmp_path: Path) -> HostSource:
    """A machine whose /proc a test writes."""
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/pressure/memory").write_text(
        "some avg10=12.50 avg60=0.00 avg300=0.00 total=170671\nfull avg10=1.00 total=8\n"
    )
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 24\n")
    return HostSource(node=1, disks={"data": tmp_path}, proc=tmp_path / "proc", cgroups=tmp_path)


def statistics(path: Path, operations: int, ms: int) -> str:
    """/proc/diskstats with the disk of a path."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)} {os.minor(device)}"
    return f"7 0 loop0 0 0 0 0 0 0 0 0 0 0 0\n{number} sda {operations} 0 0 {ms} 10 0 0 5 0 0 0\n"


def test_a_host_says_what_its_kernel_counts(host: HostSource, tmp_path: Path) -> None:
    (tmp_path / "proc/diskstats").write_text(statistics(tmp_path, 100, 500))
    found = host.read(1.0)
    assert values(found)["memory_pressure"] == 12.5
    assert values(found)["oom_kills"] == 24.0
    assert values(found)["disk_free"] > 0
    assert 0.0 <= values(found)["disk_free_share"] <= 1.0
    assert "disk_latency" not in values(found), "there is nothing to compare with yet"
    (tmp_path / "proc/diskstats").write_text(statistics(tmp_path, 110, 600))
    assert values(host.read(2.0))["disk_latency"] == pytest.approx(0.01)
    assert "disk_latency" not in values(host.read(3.0)), "the disk did nothing"
    assert {one.where for one in host.read(4.0)} == {Place(node=1), Place(node=1, device="data")}
    assert host.problems() == []


def test_a_group_s_own_kills_are_counted_where_it_has_a_counter(tmp_path: Path) -> None:
    group = tmp_path / "groups/jobs/a"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 1\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/x\n0::/jobs/a\n")
    source = HostSource(proc=tmp_path, cgroups=tmp_path / "groups")
    assert values(source.read(0.0))["oom_kills"] == 1.0


def test_a_disk_without_statistics_is_read_from(host: HostSource, tmp_path: Path) -> None:
    (tmp_path / "proc/diskstats").write_text("nonsense\n")
    (tmp_path / "probe").write_bytes(bytes(10_000))
    host.probe = {"data": tmp_path / "probe"}
    assert 0.0 <= values(host.read(1.0))["disk_latency"] < 60.0
    assert host.problems() == []


def test_what_a_kernel_does_not_offer_is_said_once(tmp_path: Path) -> None:
    source = HostSource(disks={"data": tmp_path / "gone"}, proc=tmp_path, cgroups=tmp_path)
    for now_s in range(5):
        assert source.read(float(now_s)) == []
    said = {(one.metric, one.device) for one in source.problems()}
    assert said == {
        ("memory_pressure", ""),
        ("oom_kills", ""),
        ("disk_free", "data"),
        ("disk_latency", "data"),
    }
    assert source.problems() == []


@pytest.mark.parametrize(
    "text", ["", "some", "some avg10=", "some avg10=x y", "\xff\xfe", "0" * 99]
)
def test_a_kernel_that_writes_otherwise_is_no_error(
    host: HostSource, tmp_path: Path, text: str
) -> None:
    for name in ("pressure/memory", "vmstat", "diskstats"):
        (tmp_path / "proc" / name).write_text(text)
    found = host.read(0.0)
    assert {one.metric for one in found} <= {"disk_free", "disk_free_share"}
    assert {one.metric for one in host.problems()} >= {"memory_pressure", "oom_kills"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_a_problem(host: HostSource, tmp_path: Path) -> None:
    (tmp_path / "proc/pressure/memory").chmod(0)
    assert "memory_pressure" not in values(host.read(0.0))
    assert "PermissionError" in host.problems()[0].why


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no /proc")
def test_the_real_host_has_something_to_say(tmp_path: Path) -> None:
    source = HostSource(disks={"here": tmp_path})
    assert "disk_free" in values(source.read(0.0))
    assert all(one.why for one in source.problems())


def test_injected_and_real_reports_are_readings(tmp_path: Path) -> None:
    """The file that ``health-event`` writes to, and a second reader of it."""
    file, other = ReportFile(tmp_path / "h"), ReportFile(tmp_path / "h")
    source = ReportedSource(ReportFile(tmp_path / "h"))
    assert source.read(0.0) == []
    file.append(HealthReport(what="xid", code=94, device="cuda:1", rank=1, source="injected"))
    file.append(HealthReport(what="thermal", code=91, node=2, source="nvml"))
    found = source.read(5.0)
    assert found == [
        Reading(Place(1, None, "cuda:1"), "reported_xid", 94.0, "number", 5.0, None, "injected"),
        Reading(Place(None, 2), "reported_thermal", 91.0, "degC", 5.0, None, "nvml"),
    ]
    assert source.read(6.0) == []
    assert len(list(other.read())) == 2
    assert source.problems() == []


def test_a_report_file_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "h"
    source = ReportedSource(ReportFile(path))
    report = HealthReport(what="ecc", code=1, source="nvml").model_dump_json().encode() + b"\n"
    path.write_bytes(b"\xff\n{}\n[]\nnull\n" + b"x" * (2 * MOST_BYTES) + b"\n" + report)
    found = [one for now_s in range(4) for one in source.read(float(now_s))]
    assert [one.metric for one in found] == ["reported_ecc"]
    path.write_bytes(report)  # begun anew
    assert len(source.read(9.0)) == 1
    path.unlink()
    path.mkdir()
    for now_s in range(3):
        assert source.read(float(now_s)) == []
    assert [one.metric for one in source.problems()] == ["reports"]


def test_problems_are_bounded_in_number_and_length() -> None:
    problems = Problems("x")
    for i in range(MOST_PROBLEMS + 500):
        problems.note(str(i), "", "w" * 10_000)
    said = problems.take()
    assert len(said) == MOST_PROBLEMS
    assert max(len(one.why) for one in said) == MOST_WORDS
