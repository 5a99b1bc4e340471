"""``chaos init`` on real commands: what it writes, what it refuses, and that it leaves nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.decided import decided
from tests.support.running import PYTHON, ROOT, kill, until
from trainchaos.chaos.cli import build_catalogue, invoke
from trainchaos.chaos.errors import EXIT_INCONCLUSIVE, EXIT_INTERRUPTED, EXIT_PASS, EXIT_USAGE
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.scenario.model import Scenario

pytestmark = pytest.mark.real

ODD = """
import json, os, time
from pathlib import Path

place = Path(os.environ.get("MY_CKPT_DIR", ".")) / "model.ckpt"
done = json.loads(place.read_text())["n"] if place.exists() else 0
print("3 of 4 shards loaded, 12 workers")
for n in range(done + 1, 61):
    time.sleep(0.05)
    print(f"<< it#{n:05d} >> L={1 / n:.4f} | loss~{1 / n:.3f} ({n % 7} ms)")
    if n % 5 == 0:
        place.with_suffix(".tmp").write_text(json.dumps({"n": n}))
        place.with_suffix(".tmp").rename(place)
"""
ENDLESS = """
import os, subprocess, sys, time
from pathlib import Path

# one process below it, in a session of its own
code = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
Path(os.environ["ALIVE"]).touch()
for n in range(1, 10**6):
    time.sleep(0.05)
    print(f"step {n} loss 1.5")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a user, with everything temporary below it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "home"


def left(folder: Path) -> list[str]:
    """Processes whose directory is that of the user, and temporary files of chaos itself."""
    found = [str(path) for path in (folder.parent / "tmp").glob("chaos*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                place = os.readlink(entry / "cwd")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if place.startswith(str(folder.parent)) and state not in "ZX":
                found.append(entry.name)
    return found


def scenario(path: Path) -> Scenario:
    """The first cell of a scenario file."""
    return load(path, build_catalogue()).cells[0].scenario


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_script_with_odd_lines_has_a_scenario_that_passes_and_is_tightened(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "odd.py").write_text(ODD)
    assert invoke(["init", "--", sys.executable, "odd.py"]) == EXIT_PASS
    said = capsys.readouterr().out
    assert "not found" not in said and "not certain" not in said
    assert "next    chaos run chaos-odd.yaml" in said
    assert sorted(path.name for path in folder.iterdir()) == ["chaos-odd.yaml", "odd.py"]
    assert left(folder) == []
    spec = scenario(folder / "chaos-odd.yaml").workload
    assert (spec.ranks, spec.restarts, spec.env) == (1, 2, {"MY_CKPT_DIR": "$CHAOS_SCRATCH"})
    assert spec.steps == 60
    assert decided("chaos-odd.yaml", "runs") == EXIT_PASS, capsys.readouterr()
    before = scenario(folder / "chaos-odd.yaml")
    assert invoke(["init", "--from", "runs/odd/latest"]) == EXIT_PASS
    after = scenario(folder / "chaos-odd.yaml")
    assert after.sla != before.sla and after.model_copy(update={"sla": before.sla}) == before
    assert left(folder) == []


@pytest.mark.slow
def test_the_next_command_has_a_script_resume_that_does_so_only_when_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "odd.py").write_text(f'# add_argument("--resume", action="store_true")\n{ODD}')
    assert invoke(["init", "--", sys.executable, "odd.py"]) == EXIT_PASS
    said = capsys.readouterr().out
    assert "next    chaos init --force -- bash -c " in said
    assert said.endswith(", or chaos run chaos-odd.yaml\n")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_torchrun_job_has_a_scenario_that_passes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text((ROOT / "examples/torchrun_ddp/train.py").read_text())
    line = "torchrun --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d"
    words = [*line.split(), "--rdzv-endpoint", "127.0.0.1:0", "train.py"]
    # its ranks find each other by the loopback device, whatever the machine's name means
    env = ["--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1"]
    assert invoke(["init", "--for", "60s", *env, "--", *words]) == EXIT_PASS
    said = capsys.readouterr().out
    assert "not found" not in said and "not certain" not in said
    assert "torchrun" in said
    spec = scenario(folder / "chaos-train.yaml").workload
    assert (spec.ranks, spec.steps, spec.restarts) == (2, 60, 0)
    assert spec.env["CHECKPOINT_DIR"] == "$CHAOS_SCRATCH"
    assert sorted(path.name for path in folder.iterdir()) == ["chaos-train.yaml", "train.py"]
    assert left(folder) == []
    assert decided("chaos-train.yaml", "runs") == EXIT_PASS, capsys.readouterr()
    assert left(folder) == []


def test_a_command_that_fails_is_shown_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.py").write_text("print('loading'); raise SystemExit('no data here')\n")
    assert invoke(["init", "--", sys.executable, "bad.py"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "exit code 1" in said and "| no data here" in said and "no scenario was written" in said
    assert [path.name for path in folder.iterdir()] == ["bad.py"]
    assert left(folder) == []


def test_a_command_that_does_not_exist_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["init", "--", "no-such-program", "x.py"]) == EXIT_USAGE
    assert "'no-such-program' is not found in PATH" in capsys.readouterr().err
    assert list(folder.iterdir()) == [] and left(folder) == []


def test_a_command_without_steps_has_a_scenario_that_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "quiet.py").write_text("print('done, and well')\n")
    assert invoke(["init", "--", sys.executable, "quiet.py"]) == EXIT_INCONCLUSIVE
    said = capsys.readouterr().out
    assert "no step was seen in 1 line" in said and "correct progress, steps in" in said
    assert scenario(folder / "chaos-quiet.yaml").workload.progress == "beacon"


@pytest.mark.long
def test_checkpoints_of_any_name_are_found_where_the_command_line_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "odd.py").write_text(
        "import pathlib, sys, time\n"
        "for n in range(1, 21):\n"
        "    print('step', n, 'loss 1.5')\n"
        "    time.sleep(0.1)\n"
        "    if n % 5 == 0:\n"
        "        place = pathlib.Path(sys.argv[1], f'after_{n}')\n"
        "        place.mkdir(parents=True)\n"
        "        (place / 'rank0').write_bytes(bytes(10000))\n"
    )
    words = [sys.executable, "odd.py", "../elsewhere"]
    assert invoke(["init", "--", *words]) == EXIT_INCONCLUSIVE
    said = capsys.readouterr().out
    assert "elsewhere/after_5/rank0" in said and "surely checkpoints, by what changed" in said
    assert "correct checkpoints in" in said and left(folder) == []


def test_a_launcher_behind_a_shell_script_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tools").mkdir()
    (folder / "tools" / "torchrun").write_text(
        "import os, subprocess, sys\n"
        "for rank in '01':\n"
        "    env = dict(os.environ, RANK=rank, WORLD_SIZE='2')\n"
        "    ranks = subprocess.Popen([sys.executable, *sys.argv[5:]], env=env)\n"
        "ranks.wait()\n"
    )
    (folder / "job.py").write_text(  # whole lines, as two ranks write to one pipe without a buffer
        "import sys, time\nfor n in range(1, 21):\n    sys.stdout.write(f'step {n}\\n')\n"
        "    time.sleep(0.1)\n"
    )
    line = "torchrun --nproc-per-node 2 --max-restarts 3 job.py"
    (folder / "train.sh").write_text(f"export MASTER_ADDR=::1\n{PYTHON} tools/{line}\n")
    assert invoke(["init", "--", "bash", "train.sh"]) == EXIT_PASS
    said = capsys.readouterr().out
    assert "torchrun, started by bash train.sh" in said
    spec = scenario(folder / "chaos-train.yaml").workload
    assert (spec.ranks, spec.steps, spec.restarts) == (2, 20, 0)
    assert left(folder) == []


def test_a_beacon_is_heard(folder: Path) -> None:
    (folder / "rings.py").write_text(
        "import os, sys\nsys.path.insert(0, sys.argv[1])\nfrom trainchaos import beacon\n"
        "for n in range(1, 21):\n    beacon.step(n, loss=1.5)\n"
    )
    words = [sys.executable, "rings.py", str(ROOT)]
    assert invoke(["init", "--out", "x.yaml", "--", *words]) == EXIT_PASS
    written = scenario(folder / "x.yaml")
    spec = written.workload
    assert (spec.progress, spec.steps, spec.ranks) == ("beacon", 20, 1)
    assert written.name == "x", "it is called by the file that was named"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("line", "left_running"), [("{} t.py > t_0.log", False), ("nohup {} t.py > t_0.log &", True)]
)
def test_steps_that_are_printed_elsewhere_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, left_running: bool
) -> None:
    (folder / "t.py").write_text(
        "import time\nfor n in range(1, 21):\n    print('step', n, 'loss', 1 / n, flush=True)\n"
        f"time.sleep({60 if left_running else 0})\n"
    )
    words = ["sh", "-c", line.format(PYTHON)]
    due = EXIT_INCONCLUSIVE if left_running else EXIT_PASS
    assert invoke(["init", "--for", "20s", "--", *words]) == due
    said = capsys.readouterr().out
    assert "steps 1 to 20" in said and "in the file t_0.log" in said
    assert "file: 't_0.log'" in (folder / "chaos-t.yaml").read_text()
    assert "train more steps" not in said.split("checkpoints")[0]
    assert ("ended and left processes running: python" in said) is left_running
    assert ("in the foreground (without & and nohup)" in said) is left_running
    assert left(folder) == []


def raising_read_only(**_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_where_nothing_can_be_written_is_said_before_the_watch(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["init", "--", sys.executable, "-c", "open('ran', 'w')"]
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "NamedTemporaryFile", raising_read_only)
        assert invoke(words) == EXIT_USAGE
    assert "cannot be written to: Read-only file system" in capsys.readouterr().err
    assert not (folder / "ran").exists()
    monkeypatch.chdir("/")
    assert invoke(words) == EXIT_USAGE
    assert "the working directory is /" in capsys.readouterr().err


def test_a_file_that_exists_is_not_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "quiet.py").write_text("print('done')\n")
    (folder / "chaos-quiet.yaml").write_text("mine\n")
    words = [sys.executable, "quiet.py"]
    assert invoke(["init", "--", *words]) == EXIT_USAGE
    assert "chaos-quiet.yaml exists" in capsys.readouterr().err
    assert (folder / "chaos-quiet.yaml").read_text() == "mine\n"
    assert invoke(["init", "--force", "--", *words]) == EXIT_INCONCLUSIVE
    assert (folder / "chaos-quiet.yaml").read_text() != "mine\n"


@pytest.mark.long
@pytest.mark.slow
def test_a_slow_start_is_waited_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "slow.py").write_text(
        "import time\nprint('loading')\ntime.sleep(3.5)\n"
        "for n in range(1, 10**6):\n    print(f'step {n}/900')\n    time.sleep(0.1)\n"
    )
    assert invoke(["init", "--for", "1.5s", "--", sys.executable, "slow.py"]) == EXIT_PASS
    assert scenario(folder / "chaos-slow.yaml").workload.steps == 900
    assert "the first after 4 s" in capsys.readouterr().out and left(folder) == []


def test_a_link_to_a_scenario_stays_one(folder: Path) -> None:
    (folder / "quiet.py").write_text("print('done')\n")
    (folder / "kept.yaml").write_text("mine\n")
    (folder / "kept.yaml").chmod(0o600)
    (folder / "chaos-quiet.yaml").symlink_to("kept.yaml")
    assert invoke(["init", "--force", "--", sys.executable, "quiet.py"]) == EXIT_INCONCLUSIVE
    assert (folder / "chaos-quiet.yaml").is_symlink()
    assert "version: 1" in (folder / "kept.yaml").read_text()
    assert (folder / "kept.yaml").stat().st_mode & 0o777 == 0o600


def test_a_program_that_cannot_be_executed_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken").write_bytes(b"\0no program")
    (folder / "broken").chmod(0o755)
    assert invoke(["init", "--", "./broken"]) == EXIT_USAGE
    assert "could not be started: Exec format error" in capsys.readouterr().err
    assert left(folder) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--from", "runs/x", "--", "python", "x.py"],
        ["--from", "runs/x", "--steps", "5"],
        ["--for", "soon", "--", "python", "x.py"],
        ["--for", "0s", "--", "python", "x.py"],
        ["--env", "A", "--", "python", "x.py"],
        ["--steps", "0", "--", "python", "x.py"],
        ["--out", "nowhere/x.yaml", "--", "python", "x.py"],
    ],
)
def test_wrong_words_are_refused(folder: Path, arguments: list[str]) -> None:
    assert invoke(["init", *arguments]) == EXIT_USAGE
    assert list(folder.iterdir()) == []


def begun(folder: Path) -> subprocess.Popen[str]:
    """A watch of a command that does not end, in a process of its own, once it is under way."""
    (folder / "endless.py").write_text(ENDLESS)
    alive = folder / "alive"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainchaos",
            "init",
            "--for",
            "5m",
            "--",
            sys.executable,
            "endless.py",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ALIVE": str(alive)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(alive.exists)
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.sample(1)
def test_an_interrupted_watch_leaves_nothing(folder: Path, signum: signal.Signals) -> None:
    process = begun(folder)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    code = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: 143}[signum]
    assert process.returncode == code, err
    assert "written" not in out and "no scenario was written" in err and "Traceback" not in err
    assert left(folder) == [] and not (folder / "chaos-endless.yaml").exists()


def test_the_command_ends_with_a_watch_that_is_killed(folder: Path) -> None:
    process = begun(folder)
    kill(process.pid)
    process.communicate(timeout=60)
    until(lambda: [one for one in left(folder) if one.isdigit()] == [])
