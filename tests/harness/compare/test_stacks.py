"""Stacks: how each is started and what it says of itself, what their scripts refuse, who starts and
ends their processes, and that training under them is that of plain training.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import LIMIT_S, until
from tests.support.stack_jobs import output, reported, start
from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.environments.stack import FAMILIES, CommonJob, Settings
from trainchaos.harness.compare.environments.tuned import stack_of
from trainchaos.harness.peers import supervise
from trainchaos.harness.script.listen.progress import ProgressReport
from trainchaos.harness.script.processes.guard import descendants

TRAIN_LIMIT_S = 280.0
PYTHON = Path("/env/bin/python")
JOB = CommonJob(
    size="nano", ranks=4, steps=60, global_batch=16, every=20, seed=7, data=Path("/data/corpus.bin")
)
OURS = ("none", "torchrun", "hot-spare", "drop-replica", "checkpoint-restart")
PEERS = "trainchaos.harness.peers"
LIGHTHOUSE = (
    "--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000 --heartbeat_timeout_ms 5000"
)


@pytest.mark.parametrize(
    ("name", "settings", "words", "env"),
    [
        (
            "torchft",
            "default",
            [
                f"-m {PEERS}.torchft_replicas",
                f"--lighthouse {LIGHTHOUSE}",
                "--min-replicas 1 --group-timeout 5 --timeout 30",
                "--gradients ddp",
            ],
            {},
        ),
        ("torchft", "tuned", ["--min_replicas 3", "--min-replicas 3", "--gradients flat"], {}),
        (
            "nvrx-inprocess",
            "default",
            [f"{PEERS}.supervise --ranks 4 -- {PYTHON} -m {PEERS}.nvrx_inprocess --group-timeout"],
            {},
        ),
        ("nvrx-inprocess", "tuned", ["--termination-grace-time 0"], {}),
        (
            "nvrx-ft-launcher",
            "default",
            ["-m nvidia_resiliency_ext.fault_tolerance.launcher", "--nproc-per-node 4"],
            {},
        ),
        (
            "nvrx-ft-launcher",
            "tuned",
            ["--max-restarts 3", "--ft-param-rank_heartbeat_timeout", "peers/nvrx_heartbeats.py"],
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "JOB_GROUP_TIMEOUT": "30"},
        ),
        ("dlrover", "default", [f"-m {PEERS}.dlrover_launch --max-restarts=3"], {}),
        (
            "dlrover",
            "tuned",
            ["--max-restarts=100"],
            {"JOB_MEMORY_EVERY": "2", "JOB_GROUP_TIMEOUT": "10"},
        ),
        ("ray-train", "default", [f"-m {PEERS}.ray_launch"], {"JOB_MAX_FAILURES": "3"}),
        (
            "ray-train",
            "tuned",
            [f"-m {PEERS}.ray_launch"],
            {
                "JOB_GROUP_TIMEOUT": "10",
                "JOB_MAX_FAILURES": "-1",
                "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
                "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10",
                "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
            },
        ),
    ],
)
def test_a_stack_is_started_with_its_documented_options(
    name: str, settings: Settings, words: list[str], env: Mapping[str, str]
) -> None:
    drive = stack_of(name, environments.find(name), settings).drive(JOB, PYTHON)
    said = " ".join(drive.argv)
    assert [word for word in words if word not in said] == []
    more = {key: value for key, value in drive.env.items() if key not in JOB.environment()}
    assert more.items() >= env.items() and (env or name.startswith("nvrx-in") or not more)


def test_waits_of_the_wrapper_are_longer_than_those_of_the_group() -> None:
    values = stack_of("nvrx-inprocess", environments.find("nvrx-inprocess"), "tuned").values
    group, soft, hard = (
        float(values[name])
        for name in (
            "init_process_group(timeout) s",
            "Wrapper(soft_timeout) s",
            "Wrapper(hard_timeout) s",
        )
    )
    assert group < soft < hard, "or waiting ranks die too"


@pytest.mark.parametrize("settings", ["default", "tuned"])
@pytest.mark.parametrize("name", sorted(environments.stacks()))
def test_a_stack_says_what_it_sets_why_and_what_is_emulated(name: str, settings: Settings) -> None:
    kind = environments.find(name)
    stack = stack_of(name, kind, settings)
    assert stack.title and kind.__doc__ and stack.tuned_because
    drive = stack.drive(JOB, PYTHON)
    assert JOB.environment().items() <= drive.env.items()
    said = " ".join((*drive.argv, *drive.env.values()))
    chosen = (str(value).removesuffix(" s") for value in stack.chosen().values())
    assert all(value in said for value in chosen if value[:1].isdigit()), "what it says, it does"
    spare = name in ("hot-spare", "nvrx-inprocess-spare")
    assert stack.provisioned(JOB) == JOB.ranks + spare
    assert all(stack.not_offered(family) is None for family in FAMILIES)
    needs = stack.requirements
    assert (needs is None) == (name in OURS) and (needs is None or stack.fidelity())
    if needs is not None:
        pins = environments.wanted(needs)
        assert needs.probe and all("==" in pin for pin in pins), "pinned, every one"
        assert {"torch", "numpy", "pydantic", "xxhash"} <= set(map(environments.package_of, pins))
        assert "docs" in stack.tuned_because or "docstrings" in stack.tuned_because
    environments.look(name)


def run_module(
    module: str, *arguments: str, env: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """A script of ``harness.peers`` in chaos's own environment, where the peers' packages
    are not.
    """
    told = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HOME), **env}
    command = [sys.executable, "-m", f"harness.peers.{module}", *arguments]
    return subprocess.run(
        command, env=told, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.sample(2)
@pytest.mark.real
@pytest.mark.parametrize(
    ("command", "with_job", "words"),
    [
        ("supervise --ranks 2 -- true", False, "lacks JOB_RANKS"),
        ("dlrover_launch", False, "lacks JOB_RANKS"),
        ("ray_launch", False, "lacks JOB_RANKS"),
        ("torchft_replicas --lighthouse=--min_replicas", False, "lacks JOB_RANKS"),
        ("torchft_replicas --lighthouse=--min_replicas", True, "chaos stacks install torchft"),
        ("torchft_train", True, "by harness.peers.torchft_replicas"),
        ("nvrx_inprocess", True, "start it by harness.peers.supervise"),
        ("nvrx_heartbeats", True, "start it by ft_launcher"),
    ],
)
def test_a_script_says_who_starts_it(
    command: str, with_job: bool, words: str, tmp_path: Path
) -> None:
    env = JOB.environment() | {"CHAOS_SCRATCH": str(tmp_path)} if with_job else {}
    ended = run_module(*command.split(), env=env, cwd=tmp_path)
    assert ended.returncode == 1 and words in ended.stderr
    assert "Traceback" not in ended.stderr


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
    monkeypatch.delitem(sys.modules, f"{PEERS}.dlrover_train", raising=False)
    script = importlib.import_module(f"{PEERS}.dlrover_train")
    seen: list[str] = []
    monkeypatch.setattr(script, "point", lambda name, step: seen.append(f"{name} {step}"))
    optimizer = script.Midway({"m": 2}, 20, passes)
    # as DLRover walks through it: once for the sizes if need be, then to copy
    for _ in range(passes):
        seen.clear()
        for part in ({"w": 1}, optimizer, {"s": 3}):
            seen += [key for key, _ in part.items()]
    assert seen == ["w", "saving 20", "m", "s"]
    monkeypatch.delitem(sys.modules, f"{PEERS}.dlrover_train")


RANK = """
    import os, sys, time
    from pathlib import Path

    here, rank = Path(sys.argv[1]), os.environ["JOB_RANK"]
    starts = len(list(here.glob(f"{rank}-*")))
    (here / f"{rank}-{starts}").write_text(str(os.getpid()))
    fates = os.environ["FATES"].split()[int(rank)].split(",")
    fate = fates[min(starts, len(fates) - 1)]
    if fate == "kill":
        os.kill(os.getpid(), 9)
    while fate == "wait" and not (here / "end").exists():
        time.sleep(0.01)
    sys.exit(0 if fate == "wait" else int(fate))
"""


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.parametrize(
    ("fates", "restarts", "code", "starts", "said"),
    [
        ("0 0 0", 0, 0, 3, ""),
        ("0 kill 0", 0, 0, 3, "rank 1 ended with 137"),
        ("3 kill", 0, None, 2, "rank 0 ended with 3"),
        ("kill,0 kill,0", 1, 0, 4, ""),
        ("5", 2, 5, 3, "is started again (0 restarts left)"),
    ],
)
def test_ranks_end_each_by_itself_and_are_started_as_often_as_told(
    tmp_path: Path, fates: str, restarts: int, code: int | None, starts: int, said: str
) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    words = ["--ranks", str(len(fates.split())), "--restarts", str(restarts), "--", sys.executable]
    env = JOB.environment() | {"CHAOS_SCRATCH": str(tmp_path), "FATES": fates}
    script = (str(tmp_path / "rank.py"), str(tmp_path))
    ended = run_module("supervise", *words, *script, env=env, cwd=tmp_path)
    assert ended.returncode == code or (code is None and ended.returncode in (3, 137)), ended.stderr
    assert said in ended.stderr
    started = len(list(tmp_path.glob("?-*")))
    assert started in (starts, starts - 1) if "0 kill" in fates else started == starts


@pytest.mark.real
def test_ranks_that_do_not_end_with_the_others_are_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    code = (
        f"import sys; from {PEERS} import supervise; supervise.LINGER_S = 0.2\n"
        "sys.exit(supervise.PeerSupervisor([sys.executable, *sys.argv[1:]],"
        " supervise.rank_environments(2)).run())"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HOME), "FATES": "0 wait"}
    command = [sys.executable, "-c", code, str(tmp_path / "rank.py"), str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0 and "ranks [1] did not end with the others" in ended.stderr
    started = [Path("/proc", path.read_text()) for path in tmp_path.glob("1-*")]
    assert not any(process.exists() for process in started)


def test_ranks_meet_at_ports_that_are_free_and_have_numbers_only_of_ours() -> None:
    ranks = supervise.rank_environments(3)
    assert [one["JOB_RANK"] for one in ranks] == ["0", "1", "2"]
    assert len({one["MASTER_PORT"] for one in ranks}) == 1
    assert all("RANK" not in set(one) - set(os.environ) for one in ranks)


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
PARENT = ("-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")


@pytest.mark.real
@pytest.mark.parametrize("how", ["ends", "told", "orphaned"])
def test_a_daemon_of_a_command_ends_with_its_launcher(how: str, tmp_path: Path) -> None:
    home, told = tmp_path / "home", tmp_path / "daemon"
    home.mkdir()
    (home / "socket").touch()
    for name, text in (("launch.py", LAUNCH), ("daemon.py", DAEMON)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    before = (sys.executable, *PARENT) if how == "orphaned" else ()
    arguments = map(str, (tmp_path / "launch.py", home, tmp_path / "daemon.py", told))
    env = {**os.environ, "PYTHONPATH": str(HOME)}
    process = subprocess.Popen([*before, sys.executable, *arguments], env=env)
    until(told.exists)
    daemon = Path(f"/proc/{told.read_text()}")
    if how == "ends":
        Path(f"{told}.end").touch()
    else:
        process.send_signal(signal.SIGTERM if how == "told" else signal.SIGKILL)
    codes = {"ends": 7, "told": 128 + signal.SIGTERM, "orphaned": -signal.SIGKILL}
    assert process.wait(LIMIT_S) == codes[how]
    until(lambda: not daemon.exists() and not home.exists())


# in the stacks' own environments


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.bin"
    path.write_bytes(bytes(i * i % 251 for i in range(300 * 64 + 1)))
    return path


def losses(job: subprocess.Popen[bytes], scratch: Path) -> dict[int, float | None]:
    """Of each step, once a job has come to a good end; the same from all ranks."""
    assert job.wait(TRAIN_LIMIT_S) == 0, output(scratch)
    assert any((scratch / "checkpoints").iterdir())
    said = reported(scratch)
    known = {one.step: one.loss for one in said}
    assert all(one.loss == pytest.approx(known[one.step], rel=1e-5) for one in said)
    return known


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", ["default", "tuned"])
@pytest.mark.parametrize(
    "name",
    [
        *("torchft", "nvrx-inprocess", "nvrx-ft-launcher", "torch-reconfigure"),
        *("dlrover", "ray-train", "torchrun", "hot-spare", "drop-replica", "checkpoint-restart"),
    ],
)
def test_losses_are_those_of_plain_training_while_nothing_happens(
    name: str, settings: Settings, data: Path, tmp_path: Path
) -> None:
    mine = losses(start(name, settings, data, tmp_path / name), tmp_path / name)
    plain = losses(start("none", "default", data, tmp_path / "none"), tmp_path / "none")
    assert mine == pytest.approx(plain, rel=1e-5) and sorted(plain) == [1, 2, 3, 4, 5, 6]


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["torchft", "nvrx-ft-launcher", "torch-reconfigure", "dlrover", "ray-train"]
)
def test_training_goes_on_after_a_kill_and_leaves_nothing(
    name: str, data: Path, tmp_path: Path
) -> None:
    scratch, steps, shared = tmp_path / name, 40, set(os.listdir("/dev/shm"))
    job = start(name, "tuned", data, scratch, ranks=3, steps=steps)

    def hit() -> list[ProgressReport]:
        assert job.poll() is None, output(scratch)
        return [one for one in reported(scratch) if one.rank == 1 and one.step >= 5]

    try:
        until(lambda: bool(hit()), TRAIN_LIMIT_S)
        pid: Any = hit()[0].pid
        os.kill(pid, signal.SIGKILL)
        before = len(reported(scratch))
        assert max(losses(job, scratch)) == steps
    finally:
        job.kill()
        job.wait()
    later = reported(scratch)[before:]
    if name in ("torchft", "torch-reconfigure"):  # others go back to a checkpoint
        assert min(one.step for one in later) >= max(one.step for one in reported(scratch)[:before])
    assert len({one.pid for one in reported(scratch)}) > 3, "somebody was started anew"
    assert not descendants() and set(os.listdir("/dev/shm")) <= shared
