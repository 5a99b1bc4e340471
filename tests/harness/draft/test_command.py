"""Launchers, frameworks and options, recognised by the words of a command, its script, and what it
was seen to start.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import until
from trainchaos.harness.draft import watch
from trainchaos.harness.draft.command import (
    SCRATCH,
    STEPS,
    Command,
    ScriptText,
    behind,
    command_of,
    find,
    launched_by,
    read_scripts,
)


def command(line: str, text: str = "", steps: int | None = None) -> Command:
    """As a draft starts it, with a script of this text."""
    return command_of(shlex.split(line), {}, ScriptText(name="train", text=text), steps)


def seen_behind(line: str, folder: Path, *processes: str) -> Command:
    """The command of a line that started these processes in a directory."""
    given = command_of(shlex.split(line), {"A": "1"}, ScriptText(), None)
    return behind(given, {tuple(shlex.split(one)): folder for one in [line, *processes]})


@pytest.mark.parametrize(
    ("line", "name", "ranks", "restarts"),
    [
        ("torchrun --nproc-per-node 4 --max-restarts 3 train.py", "torchrun", 4, 3),
        ("torchrun --nproc_per_node=2 --nnodes=2 train.py", "torchrun", 4, 0),
        ("torchrun train.py", "torchrun", 1, 0),
        ("torchrun --nproc-per-node gpu train.py", "torchrun", None, 0),
        ("/opt/env/bin/torchrun --nproc-per-node 2 train.py", "torchrun", 2, 0),
        ("python3.11 -u -m torch.distributed.launch --nproc-per-node 2 t.py", "torchrun", 2, 0),
        ("env A=1 B=2 torchrun --nproc-per-node 2 t.py", "torchrun", 2, 0),
        ("accelerate launch --num_processes 2 train.py", "accelerate", 2, 0),
        ("accelerate launch train.py", "accelerate", None, 0),
        ("deepspeed --num_gpus 4 train.py", "deepspeed", 4, 0),
        ("srun -n 8 python train.py", "srun", 8, 0),
        ("mpirun -np 2 python train.py", "mpirun", 2, 0),
        ("ray job submit -- python train.py", "ray", None, 0),
        ("python train.py", "python", None, 0),
        ("bash -c 'echo hello; python train.py'", "shell", None, 0),
        ("bash -lc 'exec torchrun --nproc-per-node 2 --max-restarts 1 t.py'", "torchrun", 2, 1),
        ("sh -c 'A=1 torchrun --nproc-per-node 2 t.py | tee log'", "torchrun", 2, 0),
        ('bash -c "it\'s broken"', "shell", None, 0),
        ("torchrunner --nproc-per-node 4", "a program of its own", None, 0),
    ],
)
def test_a_launcher(line: str, name: str, ranks: int | None, restarts: int) -> None:
    found = launched_by(shlex.split(line))
    assert (found.name, found.ranks, found.restarts) == (name, ranks, restarts)


@pytest.mark.parametrize(
    ("line", "process", "said"),
    [
        (
            "bash train.sh",
            "/usr/bin/python3 /opt/env/bin/torchrun --nproc-per-node 4 --max-restarts 2 job.py",
            ("torchrun", 4, 2, "bash train.sh"),
        ),
        (
            "python main.py",
            "/usr/bin/python3 /usr/bin/deepspeed --num_gpus 2 job.py",
            ("deepspeed", 2, 0, "python main.py"),
        ),
        ("./train", "mpirun -np 3 python job.py", ("mpirun", 3, 0, "./train")),
        ("bash train.sh", "python job.py", ("shell", None, 0, "")),
        ("torchrun --nproc-per-node 2 j.py", "mpirun -np 3 python j.py", ("torchrun", 2, 0, "")),
    ],
)
def test_the_launcher_that_really_ran(
    line: str, process: str, said: tuple[str, int | None, int, str], tmp_path: Path
) -> None:
    found = seen_behind(line, tmp_path, process).launched
    assert (found.name, found.ranks, found.restarts, found.by) == said


def test_scripts_behind_a_script_are_read_where_they_ran(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import torchft\nos.environ['MY_CKPT_DIR']\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "tool.py").write_text("import deepspeed\n")
    found = seen_behind(
        "bash train.sh",
        tmp_path,
        "python3 -u torchrun --nproc-per-node 2 job.py --max-steps 40",
        "python site-packages/tool.py",
    )
    assert [one.name for one in found.frameworks] == ["torchft"]
    assert found.group == "REPLICA_GROUP_ID"
    assert found.script.place_variables == ["MY_CKPT_DIR"]
    assert found.inner[-2:] == ["--max-steps", "40"]
    # torchft does not start with what torchrun otherwise needs
    assert (found.words, found.env) == (["bash", "train.sh"], {"A": "1"})
    other = seen_behind("bash train.sh", tmp_path, "torchrun --nproc-per-node 2 other.py")
    assert other.env == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "A": "1"}


def test_the_kernel_says_what_ran(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.stdin.read()", "--x", "a b", ""]
    with subprocess.Popen(words, cwd=tmp_path, env=os.environ, stdin=subprocess.PIPE) as child:
        until(lambda: tuple(words) in watch.running([child.pid]))
        assert watch.running([child.pid, 2**22 + 1]) == {tuple(words): tmp_path}
        child.communicate(b"")


@pytest.mark.parametrize(
    ("text", "line", "names"),
    [
        ("import lightning as L\n", "python train.py", ["Lightning"]),
        ("from pytorch_lightning import Trainer\n", "python train.py", ["Lightning"]),
        ("from transformers import Trainer\n", "python train.py", ["Hugging Face Trainer"]),
        ("import deepspeed\n", "deepspeed train.py", ["DeepSpeed"]),
        ("    import ray.train.torch\n", "python train.py", ["Ray Train"]),
        ("import torchft\n", "torchrun train.py", ["torchft"]),
        ("mp.spawn(main, nprocs=2)\n", "python train.py", ["multiprocessing"]),
        ("from accelerate import Accelerator\n", "accelerate launch t.py", ["Accelerate"]),
        ("", "torchrun pretrain_gpt.py --micro-batch-size 4", ["Megatron-LM"]),
        ("", "torchrun -m torchtitan.train --job.config_file a.toml", ["torchtitan"]),
        ("import torch\n# import transformers is not needed\n", "python train.py", []),
        ("import lightningly\n", "python train.py", []),
    ],
)
def test_a_framework(text: str, line: str, names: list[str]) -> None:
    assert [one.name for one in command(line, text).frameworks] == names


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("train.py --max_steps 100", "100"),
        ("train.py --max-steps=100", "100"),
        ("train.py trainer.max_steps=100", "100"),
        ("train.py --steps 5 --steps 100", "100"),
        ("train.py --save-steps 100", None),
        ("train.py --steps many", None),
        ("train.py --steps", None),
        ("train.py steps 100", None),
    ],
)
def test_the_argument_for_steps(line: str, value: str | None) -> None:
    option = find(shlex.split(line), STEPS, r"\d+")
    assert (option.value if option else None) == value


ARGPARSE = """
parser.add_argument("--max-steps", type=int, default=60, help="how many (at most)")
parser.add_argument('-o', '--output_dir', type=str, default='out/a')
"""


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        ("python t.py --max-steps=9000 -x", "", ["--max-steps=50", "-x"]),
        ("python t.py --max_steps 9000 -x", "", ["--max_steps", "50", "-x"]),
        ("python t.py", "", []),
        ("python t.py --save x", ARGPARSE, ["--save", f"{SCRATCH}/x", "--max-steps", "50"]),
    ],
)
def test_steps_that_are_asked_for_go_where_the_command_or_its_script_says_them(
    line: str, text: str, words: list[str]
) -> None:
    assert command(line, text, steps=50).words == ["python", "t.py", *words]


@pytest.mark.parametrize(
    ("line", "text", "words", "env"),
    [
        ("python t.py --output_dir out/model", "", ["--output_dir", f"{SCRATCH}/model"], {}),
        ("python t.py --ckpt-dir=here", "", [f"--ckpt-dir={SCRATCH}/here"], {}),
        ("python t.py a.default_root_dir=/d/run", "", [f"a.default_root_dir={SCRATCH}/run"], {}),
        ("python t.py --save .", "", ["--save", SCRATCH], {}),
        ("python t.py --save $CHAOS_SCRATCH/a", "", ["--save", f"{SCRATCH}/a"], {}),
        ("python t.py --save 10", "", ["--save", "10"], None),
        ("python t.py --save true", "", ["--save", "true"], None),
        ("python t.py", "", [], None),
        ("python t.py", ARGPARSE, ["--output_dir", f"{SCRATCH}/a"], {}),
        ("python t.py", "import configurator\nout_dir = 'out'\n", [f"--out_dir={SCRATCH}/out"], {}),
        ("python t.py", "import hydra\n", [f"hydra.run.dir={SCRATCH}/outputs"], {}),
        (
            "python t.py",
            '@click.option("--save-dir", default="x")',
            ["--save-dir", f"{SCRATCH}/x"],
            {},
        ),
        (
            "python t.py",
            'p.add_argument("--project_dir", type=Path, default=Path("runs"))',
            ["--project_dir", f"{SCRATCH}/runs"],
            {},
        ),
        ("bash -c 'python t.py'", ARGPARSE, ["-c", "python t.py"], None),
        ("bash run.sh", 'OUT="${OUT:-out}"\nlog=${TIMEOUT:-5}\n', ["run.sh"], {"OUT": SCRATCH}),
        (
            "python t.py",
            'os.environ.get("SAVE_EVERY", "5")\nos.environ.get("MY_CKPT_DIR", ".")\n'
            "os.environ['OUTPUT_DIR']\n",
            [],
            {"MY_CKPT_DIR": SCRATCH, "OUTPUT_DIR": SCRATCH},
        ),
        ("python t.py --save x", "os.environ['OUTPUT_DIR']", ["--save", f"{SCRATCH}/x"], {}),
    ],
)
def test_checkpoints_are_sent_to_scratch_by_an_option_or_a_variable(
    line: str, text: str, words: list[str], env: dict[str, str] | None
) -> None:
    """``env``: None if they cannot be sent there."""
    found = command(line, text)
    front = [word for word in shlex.split(line)[:2] if word not in words]
    assert (found.words, found.env) == ([*front, *words], env or {})
    assert bool(found.sent) is (env is not None)


def test_variables_and_their_defaults_are_read_and_the_output_of_ray_is_not_merged() -> None:
    text = 'A = os.environ.get("WHERE", "here")\nB = os.getenv("N", "5")\nsh ${RESULTS:-results}\n'
    assert ScriptText(text=text).defaults == {"WHERE": "here", "N": "5", "RESULTS": "results"}
    assert command("python t.py", "import ray.train\n").env == {"RAY_DEDUP_LOGS": "0"}


def test_scripts_are_read_by_their_words_and_as_modules(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import deepspeed\n")
    (tmp_path / "run.sh").write_text("torchrun x\n")
    found = read_scripts(["python", "-m", "pkg.train"], tmp_path)
    assert (found.name, found.text) == ("train", "import deepspeed\n")
    assert read_scripts(["bash", "run.sh"], tmp_path).name == "run"
    assert read_scripts(["python", "missing.py"], tmp_path).name == ""


@pytest.mark.parametrize("place", ["my dir", "a=b", "(1) & more", "it's"])
def test_a_script_is_read_whatever_its_path_is(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir()
    path = tmp_path / place / "my train.py"
    path.write_text('os.environ["SAVE_DIR"]\n')
    name = f"{place}/my train.py"
    for words in (
        ["python", str(path)],
        ["run", f"--script={name}"],
        ["bash", "-c", f"cd . && python {shlex.quote(name)} > log"],
    ):
        found = read_scripts(words, tmp_path)
        assert (found.name, found.place_variables) == ("my train", ["SAVE_DIR"]), words
