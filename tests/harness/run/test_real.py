"""Real processes: four ranks train, are broken, and recover, through the command line and back from
the results.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.decided import decided, unpassed
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.results import Results

pytestmark = pytest.mark.real

EXACT = {"bit for bit"}
EXACTNESS = {
    "checkpoint-restart": EXACT,
    "hot-spare": EXACT,
    "drop-replica": EXACT | {"within the control band"},
}
STRATEGIES = "[checkpoint-restart, drop-replica, hot-spare]"
GPT = (
    "{kind: gpt, size: nano, ranks: 4, steps: 36, global_batch: 16, checkpoint: {every: 8,"
    " keep: 3}}"
)
MLP = (
    "{kind: mlp, ranks: 4, steps: 60, global_batch: 16, determinism: default, checkpoint: {every:"
    " 10}}"
)
KILL = "[{id: kill, kind: process-kill, target: {rank: 2}, at: {step: 20, phase: backward}}]"
FAULTS = {
    "kill": KILL,
    "stop": "[{id: stop, kind: process-stop, target: {rank: 1}, at: {step: 20, phase: optimizer}}]",
    "nan": (
        "[{id: nan, kind: tensor-corrupt, params: {surface: gradient, op: nan}, target: {rank: 3},"
        " at: {step: 20}}]"
    ),
    "corrupt checkpoint": (
        "[{id: rot, kind: checkpoint-corrupt, params: {mode: bitflip}, target: {checkpoint:"
        " latest}, at: {event: checkpoint_committed, nth: 2}}, {id: kill, kind: process-kill,"
        " target: {rank: 0}, at: {step: 20, phase: collective}}]"
    ),
}
DEADLINE_S = 90.0


def write(
    path: Path,
    *,
    workload: str = GPT,
    recovery: str = STRATEGIES,
    faults: str = KILL,
    more: str = "",
) -> Path:
    """A scenario file; ``recovery`` in brackets becomes a matrix."""
    matrix = recovery.startswith("[")
    lines = [
        "version: 1",
        "name: real",
        "seed: 5",
        f"workload: {workload}",
        f"recovery: {'${matrix.recovery}' if matrix else recovery}",
        f"faults: {faults}",
        'stop_conditions: [{when: "no_committed_step_for > 60s"}]',
    ]
    if matrix:
        lines.append(f"matrix: {{recovery: {recovery}}}")
    path.write_text("\n".join(lines) + f"\n{more}\n")
    return path


def run(tmp_path: Path, *options: str, **scenario: str) -> tuple[int, Results]:
    """Run a scenario in this process; the exit code and the stored results."""
    path = write(tmp_path / "real.yaml", **scenario)
    code = decided(path, tmp_path / "runs", ("-q", *options))
    return code, stored(tmp_path)


def stored(tmp_path: Path) -> Results:
    """Results of the latest run."""
    return Results.model_validate_json(
        (tmp_path / "runs" / "real" / "latest" / "results.json").read_text()
    )


LONG = ("nan", "corrupt checkpoint", "stop")
"""Others test the same parts for real in less time."""


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.long if f in LONG else ()) for f in FAULTS]
)
def test_every_strategy_recovers_and_every_checker_agrees(tmp_path: Path, fault: str) -> None:
    faults, workload, strategies = FAULTS[fault], GPT, STRATEGIES
    if fault == "kill":  # of make test: few steps show it too, and a tour has a hot spare
        faults, workload = faults.replace("step: 20", "step: 11"), GPT.replace("36", "20")
        strategies = "[checkpoint-restart, drop-replica]"
    code, results = run(tmp_path, faults=faults, workload=workload, recovery=strategies)
    assert unpassed(results) == {}
    assert code == 0, results.reason
    assert all(cell.exactness in EXACTNESS[cell.strategy] for cell in results.timed)
    (elastic,) = [cell for cell in results.cells if cell.exact_for == "recovery=drop-replica"]
    assert elastic.exactness == "bit for bit"
    hits = [i for i in results.faults if i.recovery_time is not None]
    assert len(hits) == len(results.cells)
    for incident in hits:
        assert incident.landed and incident.healed
        assert incident.outcome == "recovered"
        assert sum(phase.seconds for phase in incident.phases) == pytest.approx(
            incident.recovery_time, abs=1e-6
        )
    lost = {cell.strategy: cell.metrics["samples_lost"].max for cell in results.cells}
    assert set(lost.values()) == {0.0}


@pytest.mark.long
def test_a_corrupt_checkpoint_is_refused_by_name_and_an_older_one_restored(tmp_path: Path) -> None:
    code, results = run(
        tmp_path, faults=FAULTS["corrupt checkpoint"], recovery="checkpoint-restart"
    )
    assert code == 0, results.reason
    (restored,) = {i.restored_step for i in results.faults if i.fault == "kill"}
    assert restored == 8
    log = (tmp_path / "runs/real/latest/events/default.r0.faulted").glob("*.jsonl")
    refused = [
        e for path in log for e in EventLogTail(path).read() if e.kind is Kind.CHECKPOINT_REFUSED
    ]
    assert [e.data["checkpoint"] for e in refused] == ["step-00000016"]
    assert "has checksum" in refused[0].data["reason"]


@pytest.mark.long
def test_a_cold_restart_is_bit_for_bit_too(tmp_path: Path) -> None:
    recovery = "{strategy: checkpoint-restart, restart: cold}"
    code, results = run(tmp_path, recovery=recovery, workload=MLP)
    assert code == 0, results.reason
    assert [cell.exactness for cell in results.cells] == ["bit for bit"]


@pytest.mark.long
def test_killing_rank_0_is_no_different_from_killing_rank_3(tmp_path: Path) -> None:
    endings = []
    for rank in (0, 3):
        folder = tmp_path / str(rank)
        folder.mkdir()
        faults = (
            f"[{{id: kill, kind: process-kill, target: {{rank: {rank}}}, at: {{step: 20, phase:"
            " forward}}]"
        )
        code, results = run(folder, faults=faults, recovery="hot-spare", workload=MLP)
        assert code == 0, results.reason
        assert [cell.exactness for cell in results.cells] == ["bit for bit"]
        endings.append(final_digest(folder))
    assert endings[0] == endings[1]


def final_digest(folder: Path) -> dict[str, Any]:
    """Parameter and optimizer digests of rank 0 after the last step of the faulted arm."""
    paths = (folder / "runs/real/latest/events/default.r0.faulted").glob("*.jsonl")
    digests = [
        e
        for p in paths
        for e in EventLogTail(p).read()
        if e.kind is Kind.STATE_DIGEST and e.data["rank"] == 0
    ]
    last = max(digests, key=lambda e: e.step or 0)
    return {
        "step": last.step,
        **{k: last.data[k] for k in ("parameters", "optimizer", "scheduler")},
    }


@pytest.mark.long
def test_shrinking_batch_loses_samples_and_says_how_many(tmp_path: Path) -> None:
    recovery = "{strategy: drop-replica, batch: shrink, rejoin: false}"
    faults = "[{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 51, phase: data}}]"
    code, results = run(tmp_path, faults=faults, recovery=recovery, workload=MLP)
    assert code == 0, results.reason
    # 4 samples in each of steps 51 to 60
    assert results.cells[0].metrics["samples_lost"].values == [40.0]


@pytest.mark.long
def test_an_sla_that_does_not_hold_fails_the_run_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results = run(
        tmp_path, workload=MLP, recovery="hot-spare", more='sla: {recovery_time: ["max < 1ms"]}'
    )
    assert code == 1
    out = capsys.readouterr().out
    assert "recovery_time" in out and "max < 1ms" in out
    assert [s.line for s in results.slas] == [8]


@pytest.mark.long
def test_a_fault_that_never_fires_is_inconclusive(tmp_path: Path) -> None:
    faults = "[{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 400}}]"
    code, results = run(
        tmp_path,
        workload=MLP,
        recovery="hot-spare",
        faults=faults,
        more='sla: {recovery_time: ["max < 5s"]}',
    )
    assert code == 3
    assert "400" in results.reason or any("400" in sla.detail for sla in results.slas)


@pytest.mark.long
def test_no_recovery_fails_the_job_and_says_so(tmp_path: Path) -> None:
    code, results = run(
        tmp_path, workload=MLP, recovery="none", more='sla: {recovery_time: ["max < 5s"]}'
    )
    assert code == 1
    assert results.faults[0].outcome == "fail-stop"
    assert results.faults[0].recovery_time == float("inf")
    # A job that did not finish has no result to call the same, and never used the samples of steps
    # 20 to 60.
    assert results.cells[0].exactness == "not compared"
    # Somebody who had not applied step 19 yet when rank 1 died in the next one never does.
    assert results.cells[0].metrics["samples_lost"].values[0] in (41 * 16.0, 42 * 16.0)


def test_a_simulated_run_says_that_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "real.yaml", workload=MLP, recovery="hot-spare")
    assert invoke(["run", str(path), "--runs", str(tmp_path / "runs"), "--launcher", "sim"]) == 0
    assert "simulated" in capsys.readouterr().out
    assert any("simulated" in line for line in stored(tmp_path).fidelity)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """A ``chaos run`` in a process of its own, trained far enough to be broken."""
    workload = MLP.replace("steps: 60", "steps: 100000")
    path = write(
        tmp_path / "real.yaml",
        workload=workload,
        recovery="hot-spare",
        faults="[]",
        more="baseline: none",
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainchaos",
            "run",
            str(path),
            "--runs",
            str(tmp_path / "runs"),
            "-q",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    found = Harness(process, tmp_path)
    try:
        found.wait_for_training()
        yield found
    finally:
        process.kill()
        process.wait(timeout=120)


class Harness:
    """A running harness and the processes it started."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.run = folder / "runs" / "real" / "latest"
        self.pidfds: list[int] = []

    def wait_for_training(self) -> None:
        """Wait until ranks commit steps, and hold every process the harness has started."""
        deadline = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        events: list[Event] = []
        while not any(e.kind is Kind.STEP_COMMITTED and (e.step or 0) >= 3 for e in events):
            assert time.monotonic() < deadline, "training did not begin"
            assert self.process.poll() is None, "the harness ended early"
            pause.wait(0.05)
            folders = list((self.run / "events").glob("*")) if self.run.exists() else []
            events = [
                e
                for name in ("orchestrator", "w0")
                for f in folders
                for e in EventLogTail(f / f"{name}.jsonl").read()
            ]
        pids = [e.data["pid"] for e in events if e.kind is Kind.PROCESS_SPAWNED]
        self.pidfds = [os.pidfd_open(pid) for pid in [*pids, *children_of(self.process.pid)]]

    def wait_until_gone(self) -> None:
        """Every process of the run ends within the deadline."""
        for fd in self.pidfds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(DEADLINE_S * 1000), "a process outlived the harness"
            os.close(fd)


def children_of(pid: int) -> list[int]:
    """Direct children, such as the zygote."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
def test_a_killed_harness_leaves_no_process_and_a_readable_run(harness: Harness) -> None:
    harness.process.send_signal(signal.SIGKILL)
    harness.process.wait(timeout=120)
    harness.wait_until_gone()
    assert invoke(["analyze", str(harness.run), "-q"]) == 3
    results = json.loads((harness.run / "results.json").read_text())
    assert results["verdict"] == "inconclusive"
    assert results["arms"][0]["committed_step"] > 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_an_interrupted_harness_ends_its_processes_and_writes_what_it_has(
    harness: Harness, number: int, code: int
) -> None:
    harness.process.send_signal(number)
    assert harness.process.wait(timeout=60) == code
    harness.wait_until_gone()
    results = json.loads((harness.run / "results.json").read_text())
    assert results["verdict"] == "interrupted"
    assert (harness.run / "report.html").is_file()


def test_a_run_directory_that_cannot_be_written_is_an_error_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "real.yaml", workload=MLP, recovery="hot-spare")
    (tmp_path / "file").write_text("")
    assert invoke(["run", str(path), "--runs", str(tmp_path / "file" / "runs"), "-q"]) == 4
    assert "--runs" in capsys.readouterr().err


def test_a_missing_corpus_is_an_error_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = GPT.replace("size: nano", "size: nano, params: {data: /nowhere/text}")
    path = write(tmp_path / "real.yaml", workload=workload, recovery="hot-spare")
    assert invoke(["run", str(path), "--runs", str(tmp_path / "runs"), "-q"]) == 2
    assert "/nowhere/text" in capsys.readouterr().err


def test_a_missing_capability_skips_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results = run(
        tmp_path, workload=MLP, recovery="hot-spare", more="requires: {cuda_devices: 64}"
    )
    assert code == 7
    assert "64 CUDA devices" in results.skipped[0].reason
