"""Every way out of a run: signals once and twice, a lost terminal, a dead zygote, a full disk, a
defect of ours.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import chaos_run
from trainchaos.chaos.cli import invoke
from trainchaos.harness.host import processes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.run import heal, interrupts
from trainchaos.harness.undo import live
from trainchaos.harness.undo.ledger import read_open
from trainchaos.harness.undo.records import MARKER, KillProcess, RemoveTree
from trainchaos.recovery.supervise.supervision import StopFlag

DEADLINE_S = 120.0
SCENARIO = """
version: 1
name: exits
seed: 5
workload: {kind: mlp, ranks: 2, steps: STEPS, global_batch: 8, checkpoint: {every: 1000000}}
recovery: drop-replica
baseline: none
faults: []
"""


def write(folder: Path, steps: int = 1_000_000) -> Path:
    """A scenario that does not end by itself soon."""
    path = folder / "exits.yaml"
    path.write_text(SCENARIO.replace("STEPS", str(steps)))
    return path


def the_run(runs: Path) -> RunDirectory:
    """The only run below ``runs``."""
    (found,) = [path for path in runs.glob("exits/*-5") if not path.is_symlink()]
    return RunDirectory(found)


def left(runs: Path) -> list[str]:
    """What is open in ledgers, and processes that carry a marker of these runs."""
    found = [str(path) for path in runs.glob(f"*/*/{live.FILE}")]
    for path in runs.glob("*/*/ledger.jsonl"):
        found += [str(entry) for entry in read_open(path)]
        marker = json.loads(path.read_text().split("\n")[0])["undo"]["marker"]
        ours = [
            pid
            for pid, _ in processes.since(0)
            if processes.environment_has(pid, f"{MARKER}={marker}")
        ]
        found += [f"process {pid}" for pid in ours]
    return found


class Training:
    """A ``chaos run`` in a process of its own that has come to train."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.runs = folder / "runs"
        command = chaos_run(write(folder), self.runs)
        self.process = subprocess.Popen(command, start_new_session=True, **how)
        deadline = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while '"step_committed"' not in self.log("w1"):
            assert time.monotonic() < deadline, "training did not begin"
            assert self.process.poll() is None, "it ended early"
            pause.wait(0.02)

    def log(self, actor: str) -> str:
        """What an actor has written."""
        return "".join(
            path.read_text() for path in self.runs.glob(f"exits/*-5/events/*/{actor}.jsonl")
        )

    def pid_of(self, actor: str) -> int:
        """Of a rank."""
        return int(json.loads(self.log(actor).split("\n")[0])["data"]["pid"])

    def zygote(self) -> int:
        """The process that forks ranks: of the harness's children, the one that is no rank."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        ranks = {self.pid_of("w0"), self.pid_of("w1")}
        (found,) = {int(pid) for pid in children} - ranks
        return found

    def ends(self) -> int:
        """Its exit code."""
        return self.process.wait(timeout=DEADLINE_S)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """One that is gone afterwards."""
    silent = subprocess.DEVNULL
    one = Training(tmp_path, stdout=silent, stderr=silent)
    try:
        yield one
    finally:
        one.process.kill()
        one.ends()
        heal.heal_all(one.runs)


@pytest.mark.real
def test_two_signals_end_it_at_once_and_nothing_is_left(training: Training) -> None:
    training.process.send_signal(signal.SIGINT)
    training.process.send_signal(signal.SIGTERM)
    assert training.ends() == 143
    assert left(training.runs) == []
    assert not the_run(training.runs).results.exists(), (
        "the second signal does not wait for reports"
    )


@pytest.mark.real
@pytest.mark.long
def test_a_dead_zygote_ends_the_run_with_reports(training: Training) -> None:
    os.kill(training.zygote(), signal.SIGKILL)
    os.kill(training.pid_of("w1"), signal.SIGKILL)
    assert training.ends() == 4
    run = the_run(training.runs)
    results = json.loads(run.results.read_text())
    assert results["verdict"] == "broken" and "zygote" in results["reason"], results["reason"]
    assert results["arms"][0]["committed_step"] > 0, "what was logged is judged"
    assert (run.root / "report.html").is_file()
    assert left(training.runs) == []


@pytest.mark.real
@pytest.mark.long
def test_a_lost_terminal_ends_it_like_a_signal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    one = Training(tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        os.close(theirs)
        os.close(ours)  # writing to the terminal fails from now on
        one.process.send_signal(signal.SIGHUP)
        assert one.ends() == 130
        assert json.loads(the_run(one.runs).results.read_text())["verdict"] == "interrupted"
        assert left(one.runs) == []
    finally:
        one.process.kill()
        one.ends()
        heal.heal_all(one.runs)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 130)]
)
def test_the_second_time_heals_and_ends_the_process(tmp_path: Path, number: int, code: int) -> None:
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        signal.signal(number, signal.SIG_DFL)  # these tests may have been started with nohup
        with interrupts.stop_on_signal(StopFlag(), run), heal.guarded(run) as ledger:
            sleeper = subprocess.Popen(["sleep", "600"])
            ledger.will(KillProcess.of(sleeper.pid, "sleeper"))
            ledger.will(RemoveTree(path=run.root / "made", inside=run.root))
            (run.root / "made").mkdir()
            signal.raise_signal(number)
            signal.raise_signal(number)
        os._exit(77)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    with os.fdopen(reader) as stream:
        said = stream.read()
    first = "terminated" if number == signal.SIGTERM else "interrupted"
    assert said.startswith(f"{first}: ending the run's processes (")
    assert "at once" in said and "killed process" in said and "removed" in said
    assert not (run.root / "made").exists() and heal.heal_named(run.root) == []


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_of_two_signals_is_that_of_either_order(tmp_path: Path, first: int) -> None:
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with interrupts.stop_on_signal(StopFlag(), run):
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGINT + signal.SIGTERM - first)
        os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143


def test_nohup_is_respected(tmp_path: Path) -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopFlag()
        with interrupts.stop_on_signal(stop, RunDirectory(tmp_path)):
            signal.raise_signal(signal.SIGHUP)
        assert stop.signum == 0
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_defect_of_ours_heals_and_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tick(injector: Injector, committed: int) -> None:
        if committed > 5:
            raise RuntimeError("made up")

    monkeypatch.setattr(Injector, "tick", tick)
    scenario = write(tmp_path, steps=40)
    assert (
        invoke(["run", str(scenario), "--runs", str(tmp_path / "runs"), "--launcher", "sim", "-q"])
        == 4
    )
    assert "made up" in capsys.readouterr().err
    results = json.loads(the_run(tmp_path / "runs").results.read_text())
    assert results["verdict"] == "broken" and "made up" in results["reason"]
    assert left(tmp_path / "runs") == []


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A place for runs on a file system of so many KiB."""
    place = tmp_path / "runs"
    place.mkdir()
    size = f"size={request.param}k"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "chaos-test", str(place)],
        check=True,
        timeout=DEADLINE_S,
    )
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=DEADLINE_S)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")


@needs_root
@pytest.mark.parametrize("small", [4, 8, 16], indirect=True)
def test_no_room_for_the_data_leaves_no_run(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        invoke(["run", str(write(tmp_path)), "--runs", str(small), "--launcher", "sim", "-q"]) == 4
    )
    err = capsys.readouterr().err
    assert "free disk space" in err
    assert list(small.glob("exits/*")) == []


@needs_root
@pytest.mark.parametrize("small", [1024], indirect=True)
def test_a_disk_that_fills_up_ends_the_run_and_nothing_is_left(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        invoke(["run", str(write(tmp_path)), "--runs", str(small), "--launcher", "sim", "-q"]) == 4
    )
    assert "disk" in "".join(capsys.readouterr())
    assert heal.exit_code(heal.heal_all(small)) == 0
    assert not list(small.glob(f"*/*/{live.FILE}"))
