"""Launchers, frameworks and arguments, recognised by the words of a command and its script."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from trainchaos.harness.draft import arguments, frameworks, launchers
from trainchaos.harness.draft.facts import SCRATCH, Command, command_of


def launched(line: str) -> launchers.Launched:
    """Of a command line."""
    return launchers.recognise(shlex.split(line))


def command(line: str, text: str = "", steps: int | None = None) -> Command:
    """As a draft starts it, with a script of this text."""
    words, script = shlex.split(line), frameworks.ScriptText(name="train", text=text)
    return command_of(words, {}, script, steps)


@pytest.mark.parametrize(
    ("line", "name", "ranks", "restarts"),
    [
        ("torchrun --nproc-per-node 4 --max-restarts 3 train.py", "torchrun", 4, 3),
        ("torchrun --nproc_per_node=2 --nnodes=2 train.py", "torchrun", 4, 0),
        ("torchrun train.py", "torchrun", 1, 0),
        ("torchrun --nproc-per-node gpu train.py", "torchrun", None, 0),
        ("/opt/env/bin/torchrun --nproc-per-node 2 train.py", "torchrun", 2, 0),
        ("python -m torch.distributed.run --nproc-per-node 8 -m pkg.train", "torchrun", 8, 0),
        ("python3.11 -u -m torch.distributed.launch --nproc-per-node 2 t.py", "torchrun", 2, 0),
        ("env A=1 B=2 torchrun --nproc-per-node 2 t.py", "torchrun", 2, 0),
        ("accelerate launch --num_processes 2 train.py", "accelerate", 2, 0),
        ("accelerate launch train.py", "accelerate", None, 0),
        ("deepspeed --num_gpus 4 train.py", "deepspeed", 4, 0),
        ("srun -n 8 python train.py", "srun", 8, 0),
        ("mpirun -np 2 python train.py", "mpirun", 2, 0),
        ("ray job submit -- python train.py", "ray", None, 0),
        ("python train.py", "python", None, 0),
        ("bash run.sh", "shell", None, 0),
        ("bash -c 'echo hello; python train.py'", "shell", None, 0),
        ("bash -lc 'exec torchrun --nproc-per-node 2 --max-restarts 1 t.py'", "torchrun", 2, 1),
        ("sh -c 'A=1 torchrun --nproc-per-node 2 t.py | tee log'", "torchrun", 2, 0),
        ('bash -c "it\'s broken"', "shell", None, 0),
        ("./train", "a program of its own", None, 0),
        ("torchrunner --nproc-per-node 4", "a program of its own", None, 0),
    ],
)
def test_a_launcher(line: str, name: str, ranks: int | None, restarts: int) -> None:
    found = launched(line)
    assert (found.name, found.ranks, found.restarts) == (name, ranks, restarts)


@pytest.mark.parametrize(
    ("text", "line", "names"),
    [
        ("import lightning as L\n", "python train.py", ["Lightning"]),
        ("from pytorch_lightning import Trainer\n", "python train.py", ["Lightning"]),
        ("from transformers import Trainer\n", "python train.py", ["Hugging Face Trainer"]),
        ("import deepspeed\n", "deepspeed train.py", ["DeepSpeed"]),
        ("from ray import train\n", "python train.py", ["Ray Train"]),
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
        ("train.py --training.steps 100", "100"),
        ("train.py --steps 5 --steps 100", "100"),
        ("train.py --save-steps 100", None),
        ("train.py --steps many", None),
        ("train.py --steps", None),
        ("train.py steps 100", None),
    ],
)
def test_the_argument_for_steps(line: str, value: str | None) -> None:
    found = arguments.find(shlex.split(line), arguments.STEPS, r"\d+")
    assert (found.value if found else None) == value


def test_steps_that_are_asked_for_go_into_the_argument_that_says_them() -> None:
    assert command("python t.py --max-steps=9000 -x", steps=50).words[2] == "--max-steps=50"
    assert command("python t.py --max_steps 9000 -x", steps=50).words[3] == "50"
    assert command("python t.py", steps=50).words == ["python", "t.py"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("python t.py --output_dir out/model", f"{SCRATCH}/model"),
        ("python t.py --ckpt-dir=here", f"--ckpt-dir={SCRATCH}/here"),
        (
            "python t.py trainer.default_root_dir=/data/run",
            f"trainer.default_root_dir={SCRATCH}/run",
        ),
        ("python t.py --save .", SCRATCH),
        ("accelerate launch t.py --project_dir runs", f"{SCRATCH}/runs"),
        ("python t.py --save $CHAOS_SCRATCH/a", f"{SCRATCH}/a"),
    ],
)
def test_checkpoints_are_sent_to_scratch_by_the_option_for_them(line: str, word: str) -> None:
    found = command(line)
    assert found.words[-1] == word
    assert found.sent


@pytest.mark.parametrize(
    "line", ["python t.py --save 10", "python t.py --save true", "python t.py"]
)
def test_what_is_no_place_of_checkpoints_stays(line: str) -> None:
    found = command(line)
    assert found.words == shlex.split(line) and not found.sent


def test_checkpoints_are_sent_to_scratch_by_the_variable_that_the_script_reads() -> None:
    text = (
        'every = os.environ.get("SAVE_EVERY", "5")\n'
        'place = os.environ.get("MY_CKPT_DIR", ".")\n'
        "other = os.environ['OUTPUT_DIR']\n"
    )
    assert command("python t.py", text).env == {"MY_CKPT_DIR": SCRATCH, "OUTPUT_DIR": SCRATCH}
    assert command("python t.py --save x", text).env == {}
    assert command("python t.py", 'os.environ.get("STORAGE_PATH", x)').env == {
        "STORAGE_PATH": SCRATCH
    }


ARGPARSE = """
parser.add_argument("--max-steps", type=int, default=60, help="how many (at most)")
parser.add_argument('-o', '--output_dir', type=str, default='out/a')
"""


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        ("python t.py", ARGPARSE, ["--output_dir", f"{SCRATCH}/a"]),
        (
            "python t.py",
            "from configurator import x\nout_dir = 'out'\n",
            [f"--out_dir={SCRATCH}/out"],
        ),
        ("python t.py", "import hydra\n", [f"hydra.run.dir={SCRATCH}/outputs"]),
        (
            "torchrun t.py",
            '@click.option("--save-dir", default="x")',
            ["--save-dir", f"{SCRATCH}/x"],
        ),
        (
            "python t.py",
            'p.add_argument("--project_dir", type=Path, default=Path("runs"))',
            ["--project_dir", f"{SCRATCH}/runs"],
        ),
        ("bash -c 'python t.py'", ARGPARSE, []),
        ("python t.py --output_dir $CHAOS_SCRATCH/b", ARGPARSE, []),
        ("bash run.sh", 'OUT="${OUT:-out}"\nlog=${TIMEOUT:-5}\n', []),
    ],
)
def test_an_option_that_the_script_declares_sends_checkpoints_to_scratch(
    line: str, text: str, words: list[str]
) -> None:
    found = command(line, text)
    assert found.words == [*shlex.split(line), *words]
    kind = found.launched.kind
    assert found.env == ({"OUT": SCRATCH} if "OUT:" in text else dict(kind.env if kind else {}))


def test_steps_that_are_asked_for_go_into_an_option_that_the_script_declares() -> None:
    assert command("python t.py", ARGPARSE, steps=9).words[2:4] == ["--max-steps", "9"]


def test_variables_and_their_defaults_are_read() -> None:
    text = 'A = os.environ.get("WHERE", "here")\nB = os.getenv("N", "5")\nsh ${RESULTS:-results}\n'
    found = frameworks.ScriptText(text=text)
    assert found.defaults == {"WHERE": "here", "N": "5", "RESULTS": "results"}


def test_the_output_of_ray_is_not_merged() -> None:
    assert command("python t.py", "import ray.train\n").env == {"RAY_DEDUP_LOGS": "0"}


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("max_steps = 500\n", 500),
        ('    STEPS = int(os.environ.get("STEPS", "60"))\n', 60),
        ("max_iters: int = 300\n", 300),
        ("max_steps = 500\nsteps = 20\n", None),
        ("save_steps = 500\n", None),
        ("trainer = Trainer(devices=2, max_steps=60)\n", 60),
        ('config={"lr": 0.1, "num_steps": 60}\n', 60),
        ("Trainer(save_steps=500)\n", None),
        ("for step in range(1, 61):\n", 60),
        ("for step in range(60):\n", 60),
        (ARGPARSE, 60),
        ("", None),
    ],
)
def test_the_steps_that_a_script_seems_to_do(text: str, guess: int | None) -> None:
    found = frameworks.ScriptText(text=text).steps_guess
    assert (found[0] if found else None) == guess


def test_scripts_are_read_by_their_words_and_as_modules(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import deepspeed\n")
    (tmp_path / "run.sh").write_text("torchrun x\n")
    found = frameworks.read_scripts(["python", "-m", "pkg.train"], tmp_path)
    assert (found.name, found.text) == ("train", "import deepspeed\n")
    assert frameworks.read_scripts(["bash", "run.sh"], tmp_path).name == "run"
    assert frameworks.read_scripts(["python", "missing.py"], tmp_path).name == ""
    words = ["bash", "-c", "cd x; python3 'pkg/train.py' > log"]
    assert frameworks.read_scripts(words, tmp_path).name == "train"


@pytest.mark.parametrize("place", ["my dir", "a=b", "(1) & more", "it's"])
def test_a_script_is_read_whatever_its_path_is(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir()
    path = tmp_path / place / "my train.py"
    path.write_text('os.environ["SAVE_DIR"]\n')
    name = f"{place}/my train.py"
    for words in (
        ["python", name],
        ["python", str(path)],
        ["run", f"--script={name}"],
        ["bash", "-c", f"cd . && python {shlex.quote(name)} > log"],
    ):
        found = frameworks.read_scripts(words, tmp_path)
        assert (found.name, found.place_variables) == ("my train", ["SAVE_DIR"]), words
