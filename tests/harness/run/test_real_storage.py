"""Storage faults on real processes and a real file system of limited size."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.run.test_real import DEADLINE_S, MLP, run, write
from tests.support.decided import unpassed
from tests.support.running import chaos_run
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.harness.launch.storage import Storage, lacks_mount
from trainchaos.harness.undo.base import mounts

pytestmark = pytest.mark.real
NEEDS_MOUNT = pytest.mark.skipif(lacks_mount() is not None, reason="mounting needs root")
KILL = "{id: kill, kind: process-kill, target: {rank: 2}, at: {step: 44, phase: backward}}"


def events(tmp_path: Path, *kinds: Kind) -> list[Event]:
    """Of the faulted arm, in order."""
    paths = (tmp_path / "runs/real/latest/events/default.r0.faulted").glob("*.jsonl")
    found = [event for path in paths for event in EventLogTail(path).read() if event.kind in kinds]
    return sorted(found, key=lambda event: event.time_ns)


def passes(code: int, results: Results) -> None:
    assert unpassed(results) == {}
    assert code == 0, results.reason
    assert all(incident.landed and incident.healed for incident in results.faults)


def mounted(path: Path) -> list[str]:
    return [place for place, _ in mounts() if place.startswith(str(path))]


@pytest.mark.long
@NEEDS_MOUNT
@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        ("disk-full", "{by: ballast, size_mib: 8}", "No space left on device"),
        pytest.param(
            "disk-full",
            "{by: shrink, size_mib: 8}",
            "No space left on device",
            marks=pytest.mark.long,
        ),
        pytest.param("read-only", "{}", "Read-only file system", marks=pytest.mark.long),
    ],
)
def test_failed_saves_are_said_and_the_last_good_checkpoint_is_restored(
    tmp_path: Path, kind: str, params: str, says: str
) -> None:
    storage = (
        f"{{id: s, kind: {kind}, params: {params}, at: {{step: 22}}, duration: {{steps: 25}}}}"
    )
    longer = MLP.replace("steps: 60", "steps: 130")  # a second of them is left when all is over
    code, results = run(
        tmp_path, workload=longer, recovery="checkpoint-restart", faults=f"[{storage}, {KILL}]"
    )
    passes(code, results)
    failed = events(tmp_path, Kind.CHECKPOINT_FAILED)
    assert failed and all(says in event.data["error"] for event in failed), failed
    assert results.cells[0].metrics["saves_failed"].max == len(failed)
    (restored,) = {
        incident.restored_step for incident in results.faults if incident.fault == "kill"
    }
    assert restored == 20, "from step 22 to 46 nothing could be saved"
    commits = [e for e in events(tmp_path, Kind.STEP_COMMITTED) if e.actor == "w0"]
    injected = next(e for e in events(tmp_path, Kind.FAULT_INJECTED) if e.data["fault"] == "s")
    assert injected.step == 22 and [
        e.step for e in commits if e.time_ns < injected.time_ns
    ] == list(range(1, 22))
    assert max(event.step or 0 for event in events(tmp_path, Kind.CHECKPOINT_COMMITTED)) == 130
    assert not mounted(tmp_path)
    assert [cell.exactness for cell in results.cells] == ["bit for bit"]


@pytest.mark.parametrize(
    ("mode", "stage"),
    [
        pytest.param("torn", "data", marks=pytest.mark.long),
        pytest.param("torn", "manifest", marks=pytest.mark.long),
        ("lose-unsynced", "renamed"),
    ],
)
@pytest.mark.long
def test_a_save_that_was_cut_off_is_never_restored_as_it_is(
    tmp_path: Path, mode: str, stage: str
) -> None:
    fault = (
        f"[{{id: t, kind: checkpoint-corrupt, params: {{mode: {mode}, stage: {stage}}}, "
        "target: {checkpoint: latest}, at: {step: 25}, expect: {detected_by: exit}}]"
    )
    code, results = run(tmp_path, workload=MLP, recovery="checkpoint-restart", faults=fault)
    passes(code, results)
    (incident,) = results.faults
    saving = str(incident.evidence["saving"])
    step = int(saving.removeprefix("step-"))
    assert incident.restored_step == (step if stage == "renamed" else step - 10)
    assert not events(tmp_path, Kind.CHECKPOINT_REFUSED)


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param("fsdp", marks=pytest.mark.long),
        pytest.param("ddp", marks=pytest.mark.long),
        pytest.param("{hsdp: {replicas: 2, shards: 2}}", marks=pytest.mark.long),
    ],
)
def test_saves_in_the_background_by_several_ranks_and_in_deltas_are_restored_exactly(
    tmp_path: Path, parallelism: str
) -> None:
    saves = "mode: async, sharded: true, delta: 3"
    workload = (
        MLP.replace("every: 10", f"every: 10, {saves}")[:-1] + f", parallelism: {parallelism}}}"
    )
    slow = (
        "{id: slow, kind: io-slow, params: {delay_s: 0.01}, target: {rank: 0}, at: {step: 5},"
        " duration: {steps: 30}}"
    )
    code, results = run(
        tmp_path, workload=workload, recovery="checkpoint-restart", faults=f"[{slow}, {KILL}]"
    )
    passes(code, results)
    restored = results.faults[-1].restored_step
    assert restored and [cell.exactness for cell in results.cells] == ["bit for bit"]
    for event in events(tmp_path, Kind.CHECKPOINT_COMMITTED)[:2]:
        assert event.data["blocked_s"] < event.data["seconds"] / 2, (
            "training waits for the copy, not for the slow disk"
        )


@pytest.mark.long
def test_a_rank_that_only_writes_a_part_is_hit_while_it_saves(tmp_path: Path) -> None:
    """With a sharded checkpoint: its writes fail, and later it is killed in the middle of
    its part.
    """
    broken = "{id: eio, kind: io-error, target: {rank: 1}, at: {step: 15}, duration: {steps: 10}}"
    torn = (
        "{id: t, kind: checkpoint-corrupt, params: {mode: torn, stage: manifest}, "
        "target: {checkpoint: latest, rank: 2}, at: {step: 45}, expect: {detected_by: exit}}"
    )
    workload = MLP.replace("every: 10", "every: 10, sharded: true")
    code, results = run(
        tmp_path, workload=workload, recovery="checkpoint-restart", faults=f"[{broken}, {torn}]"
    )
    passes(code, results)
    (failed,) = [
        e for e in events(tmp_path, Kind.CHECKPOINT_FAILED) if "gave up" in e.data["error"]
    ]
    assert failed.step == 20 and "writer 1 gave up" in failed.data["error"]
    incident = next(i for i in results.faults if i.fault == "t")
    assert (incident.restored_step, incident.blamed_rank) == (40, 2)
    assert incident.evidence["saving"] == "step-00000050"
    said = {e.data["state"] for e in events(tmp_path, Kind.CHECKPOINT_PART)}
    assert said == {"begun", "written", "failed"}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["torn", "lose-unsynced"])
def test_a_save_in_the_background_that_was_cut_off_is_never_restored(
    tmp_path: Path, mode: str
) -> None:
    fault = (
        f"[{{id: t, kind: checkpoint-corrupt, params: {{mode: {mode}, stage: data}}, "
        "target: {checkpoint: latest}, at: {step: 25}, expect: {detected_by: exit}}]"
    )
    workload = MLP.replace("every: 10", "every: 10, mode: async")
    code, results = run(tmp_path, workload=workload, recovery="checkpoint-restart", faults=fault)
    passes(code, results)
    assert results.faults[0].restored_step == 20
    assert not events(tmp_path, Kind.CHECKPOINT_REFUSED)


@pytest.mark.long
def test_two_data_files_exchanged_are_refused(tmp_path: Path) -> None:
    fault = (
        "[{id: swap, kind: checkpoint-corrupt, params: {mode: swap-shard}, target:"
        f" {{checkpoint: latest}}, at: {{event: checkpoint_committed, nth: 4}}}}, {KILL}]"
    )
    code, results = run(tmp_path, workload=MLP, recovery="checkpoint-restart", faults=fault)
    passes(code, results)
    # The other half of the exchange spoilt the one before it, too.
    refused = [event.data["checkpoint"] for event in events(tmp_path, Kind.CHECKPOINT_REFUSED)]
    assert refused == ["step-00000040", "step-00000030"]
    assert results.faults[-1].restored_step == 20


def test_without_the_privilege_the_cell_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainchaos.harness.launchers.local.lacks_mount",
        lambda: "this user may not mount; run as root",
    )
    faults = "[{id: s, kind: disk-full, at: {step: 22}, duration: {steps: 5}}]"
    code, results = run(tmp_path, workload=MLP, recovery="hot-spare", faults=faults)
    assert code == 7
    assert "run as root" in results.skipped[0].reason


@NEEDS_MOUNT
def test_a_disk_that_is_full_and_read_only_is_each_until_that_is_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    (place := run.root / "checkpoints").mkdir()
    setup: Any = SimpleNamespace(checkpoints=place, run=run, id="faulted")
    disk = Storage(setup, size_mib=4)
    try:
        disk.fill(shrink=False)
        disk.set_read_only(True)
        disk.set_read_only(False)
        assert disk.probe() == "ENOSPC"
        disk.set_read_only(True)
        disk.free()
        assert disk.probe() == "EROFS"
        disk.set_read_only(False)
        assert disk.probe() is None and not disk.used() and not list(place.iterdir())
    finally:
        disk.close()


@pytest.mark.long
@NEEDS_MOUNT
def test_a_killed_harness_leaves_a_mount_that_heal_removes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "real.yaml",
        workload=MLP.replace("steps: 60", "steps: 100000"),
        recovery="hot-spare",
        faults="[{id: s, kind: disk-full, at: {step: 12}, duration: {steps: 90000}}]",
        more="baseline: none",
    )
    process = subprocess.Popen(
        chaos_run(path, tmp_path / "runs", "-q"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_event(tmp_path, Kind.CHECKPOINT_FAILED, process)
        assert mounted(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait(timeout=120)
    assert invoke(["heal", "--runs", str(tmp_path / "runs")]) == 0
    assert not mounted(tmp_path)


def wait_for_event(folder: Path, kind: Kind, process: subprocess.Popen[bytes]) -> None:
    """Wait until a rank has written it."""
    deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while True:
        paths = (folder / "runs").glob("real/*/events/*/*.jsonl")
        if any(event.kind is kind for path in paths for event in EventLogTail(path).read()):
            return
        assert time.monotonic() < deadline and process.poll() is None, os.listdir(folder)
        pause.wait(0.05)
