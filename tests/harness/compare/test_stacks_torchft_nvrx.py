"""torchft and NVIDIA's restarts as stacks: how they are started, what their scripts refuse, and who
starts ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.running import until
from tests.support.stack_jobs import output, reported, start
from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.environments.stack import CommonJob, Settings, Stack
from trainchaos.harness.compare.stacks.nvrx_ft_launcher import NvrxFtLauncher
from trainchaos.harness.compare.stacks.nvrx_inprocess import NvrxInprocess
from trainchaos.harness.compare.stacks.torchft import Torchft
from trainchaos.harness.peers import supervise
from trainchaos.harness.script.listen.progress import ProgressReport

LIMIT_S = 60.0
TRAIN_LIMIT_S = 240.0
PYTHON = Path("/env/bin/python")
JOB = CommonJob(
    size="nano", ranks=4, steps=60, global_batch=16, every=20, seed=7, data=Path("/data/corpus.bin")
)
STACKS: list[type[Stack]] = [Torchft, NvrxInprocess, NvrxFtLauncher]


def option(argv: tuple[str, ...], name: str) -> str | None:
    """Its value in a command line, in either of the two ways of writing it."""
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def test_torchft_is_started_as_its_readme_has_it_and_tuned_with_a_majority() -> None:
    default, tuned = (Torchft(settings).drive(JOB, PYTHON) for settings in ("default", "tuned"))
    assert default.env == tuned.env == JOB.environment()
    assert default.argv[:3] == (str(PYTHON), "-m", "trainchaos.harness.peers.torchft_replicas")
    assert (
        option(default.argv, "--lighthouse")
        == "--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000 --heartbeat_timeout_ms"
        " 5000"
    )
    assert (
        option(default.argv, "--min-replicas") == "1"
        and option(tuned.argv, "--min-replicas") == "3"
    )
    assert "--min_replicas 3" in str(option(tuned.argv, "--lighthouse"))
    assert (
        option(default.argv, "--gradients") == "ddp" and option(tuned.argv, "--gradients") == "flat"
    )
    assert (option(default.argv, "--group-timeout"), option(default.argv, "--timeout")) == (
        "5",
        "30",
    )


def test_the_wrapper_has_its_own_waits_unless_tuned() -> None:
    default, tuned = (
        NvrxInprocess(settings).drive(JOB, PYTHON) for settings in ("default", "tuned")
    )
    command = (str(PYTHON), "-m", "trainchaos.harness.peers.supervise", "--ranks", "4", "--")
    script = (str(PYTHON), "-m", "trainchaos.harness.peers.nvrx_inprocess", "--group-timeout")
    assert default.argv == (*command, *script, "10")
    assert tuned.argv[: len(command) + len(script)] == (*command, *script)
    waits = {
        name: option(tuned.argv, f"--{name.replace('_', '-')}")
        for name in ("soft_timeout", "hard_timeout")
    }
    group = float(option(tuned.argv, "--group-timeout") or "inf")
    assert group < float(waits["soft_timeout"] or 0) < float(waits["hard_timeout"] or 0), (
        "or waiting ranks die too"
    )
    assert option(tuned.argv, "--termination-grace-time") == "0"


def test_the_launcher_has_its_own_timeouts_unless_tuned() -> None:
    default, tuned = (
        NvrxFtLauncher(settings).drive(JOB, PYTHON) for settings in ("default", "tuned")
    )
    for drive in (default, tuned):
        assert drive.argv[:3] == (
            str(PYTHON),
            "-m",
            "nvidia_resiliency_ext.fault_tolerance.launcher",
        )
        assert drive.argv[-1] == str(HOME / "harness" / "peers" / "nvrx_heartbeats.py")
        assert (
            option(drive.argv, "--nproc-per-node") == "4"
            and option(drive.argv, "--max-restarts") == "3"
        )
    assert option(default.argv, "--ft-param-rank_heartbeat_timeout") is None
    assert option(tuned.argv, "--ft-param-rank_heartbeat_timeout") is not None
    assert default.env == JOB.environment()
    more = {name: value for name, value in tuned.env.items() if name not in default.env}
    assert more == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "JOB_GROUP_TIMEOUT": "30"}


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("settings", ["default", "tuned"])
def test_a_stack_says_what_it_sets_and_why(kind: type[Stack], settings: Settings) -> None:
    stack = kind(settings)
    assert stack.title and not stack.ours and stack.fidelity() and stack.provisioned(JOB) == 4
    assert kind("default").chosen() != kind("tuned").chosen()
    assert "docs/source/" in stack.tuned_because, "a page that recommends it"
    said = " ".join((*stack.drive(JOB, PYTHON).argv, *stack.drive(JOB, PYTHON).env.values()))
    numbers = [
        str(value).removesuffix(" s")
        for value in stack.chosen().values()
        if str(value)[:1].isdigit()
    ]
    assert all(number in said for number in numbers), "what it says it sets, it sets"
    needs = stack.requirements
    assert needs is not None and needs.probe
    assert all("==" in pin for pin in (*needs.pins, *needs.without_dependencies))


def run_module(
    module: str, *arguments: str, env: dict[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """A script of ``harness.peers`` in chaos's own environment, where the peers' packages
    are not.
    """
    told = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HOME)} | env
    command = [sys.executable, "-m", f"harness.peers.{module}", *arguments]
    return subprocess.run(
        command, env=told, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.parametrize(
    ("command", "with_job", "words"),
    [
        ("supervise --ranks 2 -- true", False, "lacks JOB_RANKS"),
        ("torchft_replicas --lighthouse=--min_replicas", False, "lacks JOB_RANKS"),
        ("torchft_replicas --lighthouse=--min_replicas", True, "chaos stacks install torchft"),
        pytest.param(
            "torchft_train", True, "by harness.peers.torchft_replicas", marks=pytest.mark.long
        ),
        pytest.param(
            "nvrx_inprocess", True, "start it by harness.peers.supervise", marks=pytest.mark.long
        ),
        pytest.param("nvrx_heartbeats", True, "start it by ft_launcher", marks=pytest.mark.long),
    ],
)
def test_a_script_says_who_starts_it(
    command: str, with_job: bool, words: str, tmp_path: Path
) -> None:
    env = JOB.environment() | {"CHAOS_SCRATCH": str(tmp_path)} if with_job else {}
    ended = run_module(*command.split(), env=env, cwd=tmp_path)
    assert ended.returncode == 1 and words in ended.stderr
    assert "Traceback" not in ended.stderr


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


def supervised(folder: Path, fates: str, restarts: int = 0) -> tuple[int, str, int]:
    """Ranks that end as told, one word a rank, one fate a start; exit code, what was said, and how
    many starts.
    """
    (folder / "rank.py").write_text(textwrap.dedent(RANK))
    arguments = [
        "--ranks",
        str(len(fates.split())),
        "--restarts",
        str(restarts),
        "--",
        sys.executable,
    ]
    env = JOB.environment() | {"CHAOS_SCRATCH": str(folder), "FATES": fates}
    ended = run_module(
        "supervise", *arguments, str(folder / "rank.py"), str(folder), env=env, cwd=folder
    )
    return ended.returncode, ended.stderr, len(list(folder.glob("?-*")))


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
    got, words, started = supervised(tmp_path, fates, restarts)
    assert got == code or (code is None and got in (3, 137)), words
    assert said in words
    assert started in (starts, starts - 1) if "0 kill" in fates else started == starts


@pytest.mark.real
def test_ranks_that_do_not_end_with_the_others_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    code = (
        "import sys; from trainchaos.harness.peers import supervise; supervise.LINGER_S ="
        " 0.2\nsys.exit(supervise.PeerSupervisor([sys.executable, *sys.argv[1:]],"
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.bin"
    path.write_bytes(bytes(i * i % 251 for i in range(300 * 64 + 1)))
    return path


def train_under(
    name: str, settings: Settings, data: Path, scratch: Path
) -> dict[int, float | None]:
    """Train to the end without faults; the loss of each step."""
    assert start(name, settings, data, scratch).wait(TRAIN_LIMIT_S) == 0, output(scratch)
    assert any((scratch / "checkpoints").iterdir())
    said = reported(scratch)
    losses = {one.step: one.loss for one in said}
    assert all(one.loss == losses[one.step] for one in said), "all ranks report the same"
    return losses


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("settings", ["default", "tuned"])
@pytest.mark.parametrize(
    "name", ["torchft", "nvrx-inprocess", "nvrx-ft-launcher", "torch-reconfigure"]
)
def test_losses_are_those_of_plain_training_while_nothing_happens(
    name: str, settings: Settings, data: Path, tmp_path: Path
) -> None:
    losses = train_under(name, settings, data, tmp_path / name)
    plain = train_under("none", "default", data, tmp_path / "none")
    assert losses == pytest.approx(plain, rel=1e-6) and sorted(plain) == [1, 2, 3, 4, 5, 6]


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("name", ["torchft", "nvrx-ft-launcher", "torch-reconfigure"])
def test_training_goes_on_after_a_kill(name: str, data: Path, tmp_path: Path) -> None:
    scratch, steps = tmp_path / name, 40
    job = start(name, "tuned", data, scratch, ranks=3, steps=steps)
    try:

        def hit() -> list[ProgressReport]:
            assert job.poll() is None, output(scratch)
            return [one for one in reported(scratch) if one.rank == 1 and one.step >= 5]

        until(lambda: bool(hit()), TRAIN_LIMIT_S)
        pid = hit()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        before = len(reported(scratch))
        assert job.wait(TRAIN_LIMIT_S) == 0, output(scratch)
    finally:
        job.kill()
        job.wait()
    later = reported(scratch)[before:]
    assert max(one.step for one in later) == steps
    if name != "nvrx-ft-launcher":  # that goes back to a checkpoint
        assert min(one.step for one in later) >= max(one.step for one in reported(scratch)[:before])
