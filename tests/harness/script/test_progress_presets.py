"""Progress by the name of a framework, of lines that frameworks print; and ``chaos try-progress``,
which shows what an expression finds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import EXIT_FAIL, EXIT_PASS, EXIT_USAGE
from trainchaos.chaos.scenario.progress import PRESETS, PresetProgress, RegexProgress
from trainchaos.harness.script.listen.progress import GrowingFile, RegexReader

STEPS = 20
HF = (
    "  0%|          | 0/20 [00:00<?, ?it/s]\r"
    " 10%|█         | 2/20 [00:00<00:01, 15.73it/s]\r"
    " 25%|██▌       | 5/20 [00:00<00:01, 12.70it/s]"
    "                                               \r"
    "{'loss': '3.899', 'grad_norm': '0.6773', 'learning_rate': '4e-05', 'epoch': '0.25'}\n"
    " 25%|██▌       | 5/20 [00:00<00:01, 12.70it/s]\r"
    " 50%|█████     | 10/20 [00:00<00:01,  9.88it/s]\r"
    "{'loss': nan, 'grad_norm': nan, 'learning_rate': 3e-05, 'epoch': 0.5}\n"
    "  0%|          | 0/10 [00:00<?, ?it/s]\x1b[A\r"
    "100%|██████████| 10/10 [00:00<00:00, 12.76it/s]\x1b[A\r"
    "{'eval_loss': '3.901', 'eval_runtime': '0.2209', 'epoch': '0.5'}\n"
    "100%|██████████| 20/20 [00:01<00:00, 18.93it/s]\n"
    "{'train_runtime': '1.063', 'train_loss': '3.9', 'epoch': '1'}\n"
)
LIGHTNING = (
    "Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:00<00:00, 64.91it/s]\r"
    "Epoch 0:   0%|          | 0/10 [00:00<?, ?it/s]\r"
    "Epoch 0:  20%|██        | 2/10 [00:00<00:00, 272.29it/s, v_num=0, train_loss=0.979]\r"
    "Validation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00, 700.00it/s]\x1b[A\r"
    "Epoch 1:  30%|███       | 3/10 [00:00<00:00, 281.30it/s, train_loss_step=0.895, val_loss=9]\r"
    "Epoch 1: 100%|██████████| 10/10 [00:00<00:00, 281.30it/s, train_loss=1.250, val_loss=0.989]\n"
)
MEGATRON = (
    " [2026-11-25 09:00:00] iteration        2/      20 | consumed samples:           32 | elapsed"
    " time per iteration (ms): 123.4 | learning rate: 1.5E-04 | global batch size:    16 | lm loss:"
    " 1.083502E+01 | loss scale: 1.0 | grad norm: 4.2 |\n"
    " validation loss at iteration 2 | lm loss value: 9.0E+00 | lm loss PPL: 8.1E+03 |\n"
)
DEEPSPEED = (
    "[2026-11-25 09:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0,"
    " lr=[0.001], mom=[(0.9, 0.999)]\n"
    "steps: 12 loss: 2.5000 iter time (s): 0.123 samples/sec: 13.0\n"
)
TITAN = (
    "[rank1]:[titan] 2026-11-25 09:00:00 - root - INFO - \x1b[31mstep:  3  \x1b[32mloss:  8.2500 "
    " \x1b[33mgrad_norm:  1.5  memory:  1.00GiB(1%)\x1b[39m\n"
)
NANOGPT = (
    "step 0: train loss 4.2874, val loss 4.2823\n"
    "iter 0: loss 4.2654, time 385.22ms, mfu -100.00%\n"
    "iter 10: loss 3.1400, time 20.00ms, mfu 17.01%\n"
)
NEMO = (
    "[default0]:Training epoch 0, iteration 0/19 | lr: 9.804e-08 | global_batch_size: 4 |"
    " global_step: 0 | reduced_train_loss: 14.66 | train_step_timing in s: 5.276\n"
    "[default0]:Training epoch 0, iteration 1/19 | lr: 1.961e-07 | global_batch_size: 4 |"
    " global_step: 1 | reduced_train_loss: 15.07 | consumed_samples: 8\n"
    "Validation: iteration 1/2\n"
    "Training epoch 0, iteration 2/19 | lr: 1.9e-07 | reduced_train_loss: nan.0\n"
)
NANOTRON = (
    "[default0]:09/19/2024 10:00:00 [INFO|DP=0|PP=0|TP=0|ip-1]: iteration: 1 / 20 |"
    " consumed_tokens: 1.02M | elapsed_time_per_iteration_ms: 1.2K | tokens_per_sec: 12K |"
    " global_batch_size: 512 | lm_loss: 11.2 | lr: 3e-05 | grad_norm: 4\n"
    "[default0]: [INFO]: iteration: 2 / 20 | consumed_tokens: 2M | lm_loss: 10.2 | lr: 3e-05\n"
)
LITGPT = (
    "Epoch 1 | iter 1 step 0 | loss train: 1.646, val: n/a | iter time: 820.31 ms\n"
    "Epoch 1 | iter 2 step 1 | loss train: 1.660, val: n/a | iter time: 548.72 ms (step)\n"
    "iter 2: val loss 1.9, val time: 100.00 ms\n"
    "Epoch 1 | iter 4 step 2 | loss train: 1.597, val: 1.9 | iter time: 548.72 ms (step)\n"
)
OLMO = (
    "2024-04-17 09:42:26 node:0 olmo.train:816 INFO [step=1/20,epoch=0]\n"
    "    train/CrossEntropyLoss=11.25\n    train/Perplexity=76,631\n"
    "[step=2/20]\n    train/CE loss=10.73\n"
    "[eval_step=3/8]\n    eval/c4/CrossEntropyLoss=99.5\n"
)
MMENGINE = (
    "2022/08/20 10:00:00 - mmengine - INFO - Epoch(train)   [1][ 5/10]  lr: 1.0e-03  eta: 0:00:01"
    "  time: 0.1  data_time: 0.01  memory: 100  loss: 2.5  loss_cls: 1.5\n"
    "Epoch(val)   [1][ 5/10]  eta: 0:00:01  loss: 9.5\n"
    "Epoch(train)   [2][10/10]  lr: 1.0e-03  loss_cls: 1.5  loss: 2.25\n"
    "Iter(train) [   15/20]  lr: 1.0e-03  loss: 1.0\n"
)
ULTRALYTICS = (
    "        1/2      2.41G      1.215      0.395        0.9         12        640:   0%|   | 0/10"
    " [00:00<?, ?it/s]\r"
    "        1/2      2.41G      1.215      0.395        0.9         12        640:  90%|9  | 9/10"
    " [00:01<00:00,  9.9it/s]\n"
    "                 Class     Images  Instances      Box(P          R      mAP50: 100%|#| 4/4 [\n"
    "        2/2         0G        nan      0.395        0.9         12        640: 100%|##| 10/10"
    " [00:01<00:00,  9.9it/s]\n"
)
RETURNN = "".join(
    f"ep {epoch} train, step {step}, ce 1.{step}, num_seqs 12, max_size:time 1000, mem_usage:cuda:0"
    " 52.8GB, 0.717 sec/step, elapsed 0:06:53, exp. remaining 0:55:35, complete 11.02%\n"
    + (step == 2)
    * f"ep {epoch} dev eval, step 0, ce 9.5, num_seqs 3\n"
    for epoch in (1, 2)
    for step in range(3)
)
FAIRSEQ = (
    "2025-10-15 11:33:32 | INFO | train_inner | epoch 001:    10 / 487 loss=4.655, ppl=25.19,"
    " wps=1234, num_updates=10, lr=0.0005, gnorm=1.2\n"
    "2025-10-15 11:33:33 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 2.001 | ppl 4"
    " | num_updates 10\n"
    '| train_inner | {"epoch": 1, "update": 0.02, "loss": "4.5", "num_updates": "12", "lr": "1"}\n'
)
IMAGENET = (
    "Epoch: [0][  1/10]\tTime  5.2 ( 5.2)\tData  0.1 ( 0.1)\tLoss 7.0e+00 (7.1e+00)\tAcc@1 0.0\n"
    "Test: [ 1/5]\tTime  1.2 ( 1.2)\tLoss 9.0e+00 (9.0e+00)\n"
    "Epoch: [1][ 10/10]\tTime  5.2 ( 5.2)\tData  0.1 ( 0.1)\tLoss 6.0e+00 (7.1e+00)\n"
)
LINES = {
    "hf": (HF, [(2, None), (5, None), (5, 3.899), (5, None), (10, None), (10, "nan"), (20, None)]),
    "lightning": (LIGHTNING, [(2, 0.979), (13, 0.895), (20, 1.25)]),
    "nanogpt": (NANOGPT, [(0, 4.2654), (10, 3.14)]),
    "megatron": (MEGATRON, [(2, 10.83502)]),
    "torchtitan": (TITAN, [(3, 8.25)]),
    "deepspeed": (DEEPSPEED, [(10, None), (12, 2.5)]),
    "tqdm": (
        "  5%|▌ | 1/20 [00:01<00:19, 1.0it/s, loss=2.5]\r 10%|▌ | 2/20 [00:02<00:18, 1.0it/s]\n",
        [(1, 2.5), (2, None)],
    ),
    "nemo": (NEMO, [(0, 14.66), (1, 15.07), (2, "nan")]),
    "nanotron": (NANOTRON, [(1, 11.2), (2, 10.2)]),
    "litgpt": (LITGPT, [(1, 1.66), (2, 1.597)]),
    "olmo": (OLMO, [(1, None), (1, 11.25), (2, None), (2, 10.73)]),
    "mmengine": (MMENGINE, [(5, 2.5), (20, 2.25), (15, 1.0)]),
    "ultralytics": (ULTRALYTICS, [(9, 1.215), (20, "nan")]),
    "returnn": (RETURNN, [(1, 1.0), (2, 1.1), (3, 1.2), (4, 1.0), (5, 1.1), (6, 1.2)]),
    "fairseq": (FAIRSEQ, [(10, 4.655), (12, 4.5)]),
    "imagenet": (IMAGENET, [(1, 7.0), (20, 6.0)]),
    "torchft": ("[0] loss = 2.5\n[10] loss = 2.25\n", [(0, 2.5), (10, 2.25)]),
}
SCENARIO = """version: 1
name: mine
workload: {command: [python3, x.py], ranks: 1, steps: 20, progress: {preset: hf}}
faults: [{id: k, kind: process-kill, target: {rank: 0}, at: {step: 5}}]
"""


def read(path: Path, progress: RegexProgress, steps: int = STEPS) -> RegexReader:
    """A reader of what a file holds."""
    return RegexReader(GrowingFile(path), progress, steps)


def test_every_preset_has_a_log() -> None:
    assert LINES.keys() == PRESETS.keys()
    assert set(PresetProgress.model_json_schema()["properties"]["preset"]["enum"]) == set(PRESETS)


@pytest.mark.parametrize("name", LINES)
def test_steps_and_losses_of_a_framework_are_found(name: str, tmp_path: Path) -> None:
    text, due = LINES[name]
    (tmp_path / "log").write_text(text)
    reader = read(tmp_path / "log", PRESETS[name])
    found = [
        (one.step, "nan" if one.loss is not None and one.loss != one.loss else one.loss)
        for one in reader.read()
    ]
    assert found == due
    assert reader.refused == 0


def test_the_rank_that_prints_a_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(TITAN)
    (one,) = read(tmp_path / "log", PRESETS["torchtitan"]).read()
    assert one.rank == 1


def test_a_loss_before_any_step_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("{'loss': 1.0}\n 5%| | 1/20 [0\n{'loss': x}\n")
    first, second = read(tmp_path / "log", PRESETS["hf"]).read()
    assert (first.step, first.loss) == (1, None)
    assert (second.step, second.loss, dict(second.unread)) == (1, None, {"loss": "x"})


# ---- before any run


def tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str, *more: str
) -> tuple[int, str]:
    """Exit code of ``chaos try-progress``, and what it printed."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "log").write_text(log)
    code = invoke(["try-progress", str(tmp_path / "s.yaml"), str(tmp_path / "log"), *more])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_it_shows_what_was_found_and_what_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = tried(tmp_path, capsys, HF)
    assert code == EXIT_PASS
    assert "steps 2 to 20; 2 losses, 3.899 to 3.899, 1 not finite" in said
    assert "step 5  loss 3.899" in said
    assert "3 lines: nothing matched" in said and "eval_loss" in said
    assert "2 lines: other totals than workload.steps are stated" in said


def test_the_last_line_may_have_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regex = "workload.progress={regex: 'step (?P<step>[0-9]+)'}"
    code, said = tried(tmp_path, capsys, "step 1\nstep 2", "--set", regex)
    assert code == EXIT_PASS and "steps 1 to 2" in said and "2 lines, 2 report a step" in said


@pytest.mark.parametrize(
    ("log", "more", "says"),
    [
        (HF, ["--set", "workload.steps=30"], "the lines state 20 steps and workload.steps is 30"),
        ("hello\n", [], "workload.progress.preset finds no step in 1 lines"),
        ("", [], "finds no step in 0 lines"),
        (
            "step 1\nstep 2\nstep 1\nstep 2\n",
            ["--set", "workload.progress={regex: 'step (?P<step>[0-9]+)'}"],
            "step 1 comes again after step 2: is it the step of the epoch?",
        ),
        (
            "step 1\nstep 21\n",
            ["--set", "workload.progress={regex: 'step (?P<step>[0-9]+)'}"],
            "step 21 is beyond workload.steps, which is 20",
        ),
        (
            "step x\n",
            ["--set", "workload.progress={regex: 'step (?P<step>.+)'}"],
            "1 lines: group step is no number",
        ),
    ],
)
def test_it_says_what_is_wrong(
    log: str, more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = tried(tmp_path, capsys, log, *more)
    assert (code, says in said) == (EXIT_FAIL, True), said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "workload.progress=beacon"], "workload.progress is beacon: no output is read"),
        (["--set", "workload.progress.preset=foo"], "unknown preset 'foo'; use one of: deepspeed"),
        (
            ["--set", "workload.progress={regex: 'step (?P<step>.)', loss: 'x'}"],
            "a group named loss",
        ),
        (["--set", "workload.progress={regex: 'step (?P<step>.)', loss: '('}"], "not a regular"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = tried(tmp_path, capsys, HF, *more)
    assert (code, says in said) == (EXIT_USAGE, True), said
    assert "'regex' is missing" not in said


def test_a_log_that_is_missing_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    code = invoke(["try-progress", str(tmp_path / "s.yaml"), str(tmp_path / "no.log")])
    assert (code, (tmp_path / "no.log").exists()) == (EXIT_USAGE, False)
    assert "no.log: cannot be read" in capsys.readouterr().err
