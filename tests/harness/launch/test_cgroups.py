"""Limits of real control groups, the ways to be slow, and the health source."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.running import LIMIT_S
from trainchaos.harness.launch.cgroups import CgroupControl, lacks_cgroup
from trainchaos.harness.launch.nodes.cluster import NodesCluster
from trainchaos.harness.launchers.local import LocalCluster
from trainchaos.harness.rank.shims.slowness import Slowness, _gpu_work
from trainchaos.recovery.health.signs import HealthReport, ReportFile

needs_groups = pytest.mark.skipif(
    lacks_cgroup() is not None, reason=f"no control groups: {lacks_cgroup()}"
)
pytestmark = pytest.mark.real


@pytest.fixture
def child() -> int:  # type: ignore[misc]
    """A process that burns a core."""
    pid = os.fork()
    if pid == 0:
        while True:
            pass
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


@needs_groups
def test_a_quota_throttles_and_its_removal_puts_the_process_back(child: int) -> None:
    control = CgroupControl(f"test {os.getpid()}", lambda _: child)
    control.limit_cores(["w0"], 0.1)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not control.throttled("w0"):
            assert time.monotonic() < deadline, "never throttled"
    finally:
        control.release("w0")
    control.release("w0")
    assert not any(undo.path.exists() for undo in control.undo("w0"))
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "it lives on"
    assert f"test-{os.getpid()}" not in Path(f"/proc/{child}/cgroup").read_text()


@needs_groups
def test_a_memory_limit_is_the_group_s_own(child: int) -> None:
    control = CgroupControl(f"test {os.getpid()}", lambda _: child)
    control.limit_memory("w0", 16)
    try:
        assert control.oom_kills("w0") == 0
        assert f"test-{os.getpid()}-w0" in Path(f"/proc/{child}/cgroup").read_text()
    finally:
        control.release("w0")


def test_a_slow_rank_is_slow_in_its_compute_phases_only() -> None:
    slept: list[float] = []
    slow = Slowness(process="w0", group=None, sleep=slept.append)
    assert slow.set(3, "duty-cycle") == "sleeps"
    slow.ended("forward", 0.1)
    slow.ended("collective", 0.1)
    slow.set(1, "duty-cycle")
    slow.ended("forward", 0.1)
    assert slept == [pytest.approx(0.2)]


def test_competitors_for_a_core_come_and_go() -> None:
    slow = Slowness(process="w0", group=None, sleep=lambda _: None)
    before = os.sched_getaffinity(0)
    assert slow.set(2, "cpu-contention").startswith("3 threads")
    assert sum(thread.name == "burner" for thread in threading.enumerate()) == 3
    assert len(os.sched_getaffinity(0)) == 1
    slow.set(1, "cpu-contention")
    assert (os.sched_getaffinity(0), [t for t in threading.enumerate() if t.name == "burner"]) == (
        before,
        [],
    )


def test_without_the_means_nothing_is_done_and_that_is_said() -> None:
    slow = Slowness(process="w0", group=None, sleep=lambda _: None)
    assert "no control groups" in slow.set(2, "cgroup-quota")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        assert "no CUDA device" in slow.set(2, "sm-contention")


def test_a_competitor_for_a_gpu_comes_after_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is not the one on which its numbers are made."""
    torch = pytest.importorskip("torch")
    said: list[object] = []

    class Side:
        def __init__(self, device: object) -> None:
            said.append(device)

        def wait_stream(self, other: object) -> None:
            said.append(other)

    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(torch, "randn", lambda *_, device: said.append("numbers"))
    _gpu_work("cuda:1")
    assert said == ["cuda:1", "numbers", "current of cuda:1"]


def test_a_health_report_is_read_once_and_nonsense_is_passed_over(tmp_path: Path) -> None:
    source, reading = (
        ReportFile(tmp_path / "new" / "h.jsonl"),
        HealthReport(what="xid", code=79, source="nvml"),
    )
    assert list(source.read()) == []
    source.append(reading)
    with open(tmp_path / "new" / "h.jsonl", "a") as stream:
        stream.write('nonsense\n{"what": "smell"}\n{"half')
    assert list(source.read()) == [reading]
    source.append(reading)
    assert list(source.read()) == [], "its line was torn"
    source.append(reading)
    assert list(source.read()) == [reading]


def test_limits_of_a_node_hold_for_who_keeps_checkpoints_there_too() -> None:
    keepers = SimpleNamespace(
        owns={"k0"}.__contains__, pid_of={"k0": 70}.__getitem__, node_of={"k0": 1}.__getitem__
    )
    here: Any = SimpleNamespace(keepers=keepers, pids={"w0": 7})
    assert [LocalCluster._pid_of(here, name) for name in ("w0", "k0")] == [7, 70]
    there: Any = SimpleNamespace(keepers=keepers, _logs={"w0": (2, "")})
    assert [NodesCluster._node_of(there, name) for name in ("w0", "k0")] == [2, 1]
    here.keepers = None
    with pytest.raises(KeyError):
        LocalCluster._pid_of(here, "k0")
