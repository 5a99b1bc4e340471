"""DLRover and Ray Train as stacks: how they are started, and that their launchers leave nobody
behind.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S, until
from tests.support.stack_jobs import interpreter
from trainchaos import beacon
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.environments.stack import CommonJob, Settings, Stack
from trainchaos.harness.compare.environments.tuned import stack_of
from trainchaos.harness.compare.stacks.dlrover import DLRover
from trainchaos.harness.compare.stacks.ray_train import RayTrain
from trainchaos.harness.script.listen.progress import ProgressReport, parse_beacon
from trainchaos.harness.script.processes.guard import descendants

ROOT = Path(__file__).resolve().parents[3]
TRAIN_LIMIT_S = 280.0
JOB = CommonJob(
    size="nano", ranks=4, steps=60, global_batch=16, every=20, seed=7, data=Path("/data/corpus.bin")
)
PYTHON = Path("/somewhere/bin/python")
STACKS = [DLRover, RayTrain]


def test_dlrover_is_started_with_its_documented_options() -> None:
    default, tuned = (DLRover(settings).drive(JOB, PYTHON) for settings in ("default", "tuned"))
    assert default.argv == (
        str(PYTHON),
        "-m",
        "trainchaos.harness.peers.dlrover_launch",
        "--max-restarts=3",
    )
    assert tuned.argv == (*default.argv[:-1], "--max-restarts=100")
    assert default.env == JOB.environment()
    assert tuned.env == JOB.environment() | {"JOB_MEMORY_EVERY": "2", "JOB_GROUP_TIMEOUT": "10"}


def test_ray_is_started_with_its_documented_options() -> None:
    default, tuned = (RayTrain(settings).drive(JOB, PYTHON) for settings in ("default", "tuned"))
    assert default.argv == tuned.argv == (str(PYTHON), "-m", "trainchaos.harness.peers.ray_launch")
    assert default.env == JOB.environment() | {"JOB_MAX_FAILURES": "3"}
    more = {name: value for name, value in tuned.env.items() if default.env.get(name) != value}
    assert more == {
        "JOB_GROUP_TIMEOUT": "10",
        "JOB_MAX_FAILURES": "-1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10",
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    }


@pytest.mark.parametrize("every", [1, 5, 20])
def test_memory_is_saved_to_at_least_as_often_as_storage(every: int) -> None:
    job = CommonJob(
        size="nano", ranks=2, steps=9, global_batch=4, every=every, seed=1, data=Path("/d")
    )
    assert 1 <= int(DLRover("tuned").drive(job, PYTHON).env["JOB_MEMORY_EVERY"]) <= every


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("settings", ["default", "tuned"])
def test_a_stack_says_what_it_sets_why_and_what_is_emulated(
    kind: type[Stack], settings: Settings
) -> None:
    stack = kind(settings)
    assert stack.chosen() and stack.title and not stack.ours
    assert set(kind("default").chosen()) < set(kind("tuned").chosen())
    assert "docs" in stack.tuned_because and stack.fidelity()
    requirements = stack.requirements
    assert requirements is not None and requirements.probe
    assert all("==" in pin for pin in (*requirements.pins, *requirements.without_dependencies))


@pytest.mark.parametrize("passes", [1, 2])
def test_the_point_of_a_save_lies_between_the_parts_of_the_state(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ""
    for name in ("dlrover", "trainer", "torch", "flash_checkpoint", "ddp"):
        package = f"{package}.{name}" if package else name
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    for name in ("DdpCheckpointer", "StorageType"):
        setattr(sys.modules[package], name, object)
    monkeypatch.delitem(sys.modules, "trainchaos.harness.peers.dlrover_train", raising=False)
    script = importlib.import_module("trainchaos.harness.peers.dlrover_train")
    seen: list[str] = []
    monkeypatch.setattr(script, "point", lambda name, step: seen.append(f"{name} {step}"))
    state = {
        "model": {"w": 1},
        "optimizer": script.Midway({"m": 2}, 20, passes),
        "scheduler": {"s": 3},
    }
    # as DLRover walks through it: once for the sizes if need be, then to copy
    for _ in range(passes):
        seen.clear()
        for part in state.values():
            seen += [key for key, _ in part.items()]
    assert seen == ["w", "saving 20", "m", "s"]
    monkeypatch.delitem(sys.modules, "trainchaos.harness.peers.dlrover_train")


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.parametrize("module", ["dlrover_launch", "ray_launch"])
def test_a_launcher_refuses_an_environment_without_a_job(module: str, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"harness.peers.{module}"]
    ended = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 1
    assert "lacks JOB_RANKS" in ended.stderr and "chaos compare" in ended.stderr
    assert "Traceback" not in ended.stderr
    whole = env | JOB.environment()
    ended = subprocess.run(
        command, env=whole, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 1 and "CHAOS_SCRATCH is not set" in ended.stderr


LAUNCH = """
    import sys
    from pathlib import Path
    from trainchaos.harness.peers.supervise import PeerLauncher

    def main():
        with PeerLauncher([Path(sys.argv[1])]) as launcher:
            return launcher.wait(launcher.start([sys.executable, sys.argv[2], sys.argv[3]], {}))

    sys.exit(main())
"""
DAEMON = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(sys.argv[1] + ".new", "w") as stream:
                stream.write(str(os.getpid()))
            os.rename(sys.argv[1] + ".new", sys.argv[1])
            time.sleep(60)
        os._exit(0)
    os.wait()
    while not os.path.exists(sys.argv[1] + ".end"):
        time.sleep(0.02)
    sys.exit(7)
"""


class Launched:
    """A launcher with a child that leaves a daemon behind, in a session of its own."""

    def __init__(self, folder: Path, *before: str) -> None:
        self.home, self.told = folder / "home", folder / "daemon"
        self.home.mkdir()
        (self.home / "socket").touch()
        for name, text in (("launch.py", LAUNCH), ("daemon.py", DAEMON)):
            (folder / name).write_text(textwrap.dedent(text))
        arguments = [folder / "launch.py", self.home, folder / "daemon.py", self.told]
        self.process = subprocess.Popen(
            [*before, sys.executable, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        until(self.told.exists)
        self.daemon = int(self.told.read_text())

    def is_gone(self) -> bool:
        """Whether daemon and leftovers are."""
        return not Path(f"/proc/{self.daemon}").exists() and not self.home.exists()


@pytest.mark.real
def test_a_daemon_ends_with_the_command_whose_exit_code_is_the_launchers(tmp_path: Path) -> None:
    launched = Launched(tmp_path)
    Path(f"{launched.told}.end").touch()
    assert launched.process.wait(LIMIT_S) == 7
    assert launched.is_gone()


@pytest.mark.real
def test_a_daemon_ends_when_the_launcher_is_told_to(tmp_path: Path) -> None:
    launched = Launched(tmp_path)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert launched.is_gone()


@pytest.mark.real
def test_a_daemon_ends_when_the_launchers_parent_dies(tmp_path: Path) -> None:
    launched = Launched(
        tmp_path, sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"
    )
    launched.process.kill()
    launched.process.wait(LIMIT_S)
    until(launched.is_gone)


class Trained:
    """A stack's command, started as a comparison starts it, with two ranks."""

    def __init__(self, name: str, settings: Settings, folder: Path) -> None:
        python = interpreter(name)
        folder.mkdir()
        self._said = folder / "beacon"
        self._said.touch()
        data = folder / "corpus.bin"
        data.write_bytes(bytes(i * i % 251 for i in range(300 * 64 + 1)))
        job = CommonJob(size="nano", ranks=2, steps=12, global_batch=8, every=4, seed=3, data=data)
        drive = stack_of(name, environments.find(name), settings).drive(job, python)
        told = {"CHAOS_SCRATCH": str(folder), beacon.VARIABLE: str(self._said)}
        self.process = subprocess.Popen(
            drive.argv, env={**os.environ, **drive.env, **told}, cwd=folder
        )
        self._deadline = time.monotonic() + TRAIN_LIMIT_S

    def said(self) -> list[ProgressReport]:
        """All reports so far."""
        return [
            one
            for line in self._said.read_text().splitlines()
            if (one := parse_beacon(line)) is not None
        ]

    def kill(self, rank: int, after: int) -> None:
        """SIGKILL to a rank once it has reported that step."""

        def hit() -> list[ProgressReport]:
            assert self.process.poll() is None
            return [one for one in self.said() if one.rank == rank and (one.step or 0) >= after]

        until(lambda: bool(hit()), self._deadline - time.monotonic())
        pid = hit()[-1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def losses(self) -> list[tuple[int, float]]:
        """Wait for the end, which must be a good one; all (step, loss) that were reported by any
        rank, at any time.
        """
        assert self.process.wait(self._deadline - time.monotonic()) == 0
        return [(one.step, one.loss) for one in self.said() if one.loss is not None]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[[str, Settings, str], Trained]]:
    """Starts a stack in a folder of that name; what a failed test leaves running is ended."""
    started: list[Trained] = []

    def start(name: str, settings: Settings, folder: str) -> Trained:
        started.append(Trained(name, settings, tmp_path / folder))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(LIMIT_S)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", ["default", "tuned"])
@pytest.mark.parametrize("name", ["dlrover", "ray-train"])
def test_losses_are_those_of_plain_training_whether_or_not_a_rank_is_killed(
    name: str, settings: Settings, train: Callable[[str, Settings, str], Trained]
) -> None:
    shared = set(os.listdir("/dev/shm"))
    plain = dict(train("none", "default", "none").losses())
    assert sorted(plain) == list(range(1, 13))
    whole = train(name, settings, "whole").losses()
    assert len(whole) == 24 and all(loss == plain[step] for step, loss in whole)
    hit = train(name, settings, "hit")
    hit.kill(1, after=6)
    # a new DistributedDataParallel sums its first step in other buckets, which is seen in the last
    # digits
    assert all(loss == pytest.approx(plain[step], rel=1e-5) for step, loss in hit.losses())
    assert {step for step, _ in hit.losses()} == set(plain)
    assert len({one.pid for one in hit.said()}) >= 3, "somebody was started anew"
    assert not descendants() and set(os.listdir("/dev/shm")) <= shared
