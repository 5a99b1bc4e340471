"""Lines that frameworks and scripts really print, of public reports: what is a step of training in
them, which one, and which loss is its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.scenario.frameworks import FRAMEWORKS
from trainchaos.chaos.scenario.progress import PRESETS
from trainchaos.harness.script.listen import rules
from trainchaos.harness.script.listen.derive import derive
from trainchaos.harness.script.listen.progress import GrowingFile, RegexReader
from trainchaos.harness.script.listen.trial import lines_of, try_lines

Report = tuple[int, float | str | None]


def reports(text: str, folder: Path, preset: str, steps: int) -> list[Report]:
    """(step, loss) of each report."""
    (folder / "log").write_text(text)
    found = RegexReader(GrowingFile(folder / "log"), PRESETS[preset], steps).read()
    return [(one.step, "nan" if one.loss != one.loss else one.loss) for one in found]


BAR = "|##        | {} [00:01<00:04, 12.7it/s, v_num=0, {}]\r"


@pytest.mark.parametrize(
    ("preset", "steps", "line", "due"),
    [
        ("torchtitan", 30, "step: 30  loss:  2.5\nvalidate step: 30  loss:     nan\n", [(30, 2.5)]),
        ("torchtitan", 30, "\x1b[31mvalidate step:  9 \x1b[32m loss:  8.1\n", []),
        (
            "lightning",
            120,
            "Epoch 1: " + BAR.format("1/60", "val/loss=9.9, train/loss=2.5"),
            [(61, 2.5)],
        ),
        ("lightning", 120, "Epoch 0: " + BAR.format("1/60", "val_loss=9.9"), [(1, None)]),
        ("lightning", 60, "Epoch 0: " + BAR.format("17/?", "train_loss=2.660"), [(17, 2.66)]),
        ("lightning", 60, "Epoch 0: 17it [00:04,  4.36s/it, train_loss=2.660]\n", [(17, 2.66)]),
        ("lightning", 60, "Epoch 0: " + BAR.format("31/60", "train_loss=nan.0"), [(31, "nan")]),
        (
            "lightning",
            60,
            "Epoch 0: " + BAR.format("31/60", "reduced_train_loss=10.90"),
            [(31, 10.9)],
        ),
        (
            "lightning",
            60,
            "Epoch 0/9 ━━━━╺━━ 15/60 0:00:01 • 0:00:03 12.7it/s v_num: 0 train_loss: 2.66\n",
            [(15, 2.66)],
        ),
        (
            "lightning",
            60,  # resumed in epoch 1, which states one step less than it does
            "Epoch 0/-2 ━━ 30/30 0:00:02 • 0:00:00 9.08it/s train_loss: 1.4[rank1]: Traceback\n"
            "Epoch 1/-2 ━━ 1/29 0:00:02 • 0:00:00 9.08it/s train_loss: 1.3`Trainer.fit` stopped\n",
            [(30, 1.4), (31, 1.3)],
        ),
        (
            "lightning",
            60,
            "Epoch 0/-2 ━╸━━━ 3/30 0:00:00 • 0:00:03 9.08it/s train_loss: 1.402\n",  # by max_steps
            [(3, 1.402)],
        ),
        ("lightning", 60, "Validation DataLoader 0: " + BAR.format("5/60", "val_loss=2"), []),
        ("hf", 60, "Evaluating: 50%|#####     | 30/60 [00:00<00:00]\r", []),
        ("tqdm", 60, "train: 3/60 [00:00<00:05, 10it/s, train/loss=2.5, val/loss=9]\r", [(3, 2.5)]),
        ("tqdm", 2000, "1,200/2,000 [\r", [(1200, None)]),
        (
            "tqdm",
            60,
            "3/? [00:00, 10it/s, loss=2.5]\r4it [00:00, 10it/s, step_loss=2.25]\r",
            [(3, 2.5), (4, 2.25)],
        ),
        (
            "mmengine",
            30_000,
            "Epoch(train)  [83][  50/300]  lr: 1e-3  loss: 1912.3\n",
            [(24650, 1912.3)],
        ),
        (
            "mmengine",
            30_000,
            "2021 - mmdet - INFO - Epoch [2][50/300]\tlr: 2e-3, loss_cls: 1, loss: 1.5\n",
            [(350, 1.5)],
        ),
        (
            "nemo",
            40,
            "Epoch 0: : 100%" + BAR.format("39/40", "reduced_train_loss=10.9, global_step=2e+3"),
            [(39, 10.9)],
        ),
        (
            "megatron",
            10,
            " iteration   6/   10 | elapsed (ms): 5 | lm loss: nan | grad norm: nan |\n",
            [(6, "nan")],
        ),
        (
            "deepspeed",
            10,
            "epoch=0/micro_step=4/global_step=2, RunningAvgSamplesPerSec=1.5\n",
            [(2, None)],
        ),
        (
            "fairseq",
            500,
            "epoch 002:  10%|# | 50/500 [00:01<00:09, loss=2.5, ppl=5, num_updates=550]\r",
            [(550, 2.5)],
        ),
        (
            "hf",
            60,
            " 5%|# | 3/60 [0\r{'num_tokens': 12.0, 'loss': '2.5', 'epoch': 1}\n",
            [(3, None), (3, 2.5)],
        ),
    ],
)
def test_a_line_of_a_framework(
    preset: str, steps: int, line: str, due: list[Report], tmp_path: Path
) -> None:
    assert reports(line, tmp_path, preset, steps) == due


def test_a_resumed_lightning_job_goes_on_in_the_epoch_that_it_was_in(tmp_path: Path) -> None:
    lines = (
        "Epoch 0: " + BAR.format("60/60", "train_loss=2.5"),
        "Epoch 1: " + BAR.format("15/60", "train_loss=2.25"),
        "Training: " + BAR.format("11/?", "train_loss=2.0"),
    )
    assert reports("".join(lines), tmp_path, "lightning", 120) == [(60, 2.5), (75, 2.25), (71, 2.0)]


@pytest.mark.parametrize(
    "line",
    [
        "Epoch {}/-2 ━━━━╺━━ {}/30 0:00:02 • 0:00:01 9.08it/s train_loss: 1.4\n",
        "Epoch {}: " + BAR.format("{}/30", "train_loss=1.4"),
    ],
    ids=["rich", "tqdm"],
)
def test_a_bar_at_0_of_a_later_epoch_is_no_step(line: str, tmp_path: Path) -> None:
    drawn = ((0, 30), (1, 0), (1, 1), (1, 2))
    text = "".join(line.format(*one) for one in drawn)
    assert [step for step, _ in reports(text, tmp_path, "lightning", 60)] == [30, 31, 32]


def test_a_job_that_begins_behind_an_epoch_says_not_that_no_step_was_done(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Epoch 1: " + BAR.format("0/30", "v_num=0"))
    reader = RegexReader(GrowingFile(tmp_path / "log"), PRESETS["lightning"], 60)
    assert (reader.read(), reader.drawn) == ([], False)


def test_an_epoch_without_a_total_is_as_long_as_one_before(tmp_path: Path) -> None:
    lines = [f"Epoch {e}: {n}it [00:01, 2it/s]\r" for e in (0, 1, 2) for n in range(8)]
    found = [step for step, _ in reports("".join(lines), tmp_path, "lightning", 30)]
    assert sorted(set(found)) == list(range(1, 22))


@pytest.mark.parametrize(
    ("front", "is_apart"),
    [
        ("eval ", True),
        ("[val] ", True),
        ("Epoch(val) [1][", True),
        ("Test: [", True),
        ("Sanity Checking DataLoader 0: ", True),
        ("eval_step=", True),
        ("valid/step: ", True),
        ("0: Validation | ", True),
        ("/home/me/test/train.py:88 ", False),
        ("test-node1: ", False),
        ("--eval_interval=10 ", False),
        ("latest ", False),
        ("interval 5 ", False),
        ("INFO trainer.eval.loop ", False),
    ],
)
def test_words_that_set_a_line_apart(front: str, is_apart: bool) -> None:
    assert rules.apart(front) is is_apart


def read(text: str) -> tuple[list[int], list[str], str]:
    """Steps and losses that the derived expressions find, and the expression."""
    lines = text.splitlines()
    one = derive(lines)
    assert one is not None
    forms = rules.Forms(one.progress)
    found = [match for line in lines if (match := forms.step_in(rules.plain(line)))]
    alone = [loss for line in lines if (loss := forms.loss_in(line))]
    losses = alone or [match.groupdict().get("loss") or "" for match in found]
    return [int(match["step"].replace(",", "")) for match in found], losses, one.regex


def rows(form: str, steps: range = range(1, 11)) -> str:
    return "\n".join(form.format(n=n, loss=f"{5 - n / 10:.3f}") for n in steps)


LOSSES = [f"{5 - n / 10:.3f}" for n in range(1, 11)]


@pytest.mark.parametrize(
    "form",
    [
        "step {n} loss {loss}\neval step {n} loss nan",
        "step {n} loss {loss}\n[test] step: {n} loss nan",
        "step={n} loss={loss}\neval_step={n} loss=nan",
        "step {n} | loss train: {loss}, val: n/a",
        "step {n} val_loss 9.0 train_loss {loss}",
        "step:{n}/10 train_loss:{loss} train_time:5ms\nstep:{n}/10 val_loss:9.5 train_time:5ms",
        "step {n}: train loss {loss}, val loss 9.5\nstep {n}: val loss 9.5",
        "step {n} val_acc 0.9 loss {loss}",
        "\x1b[36m(RayTrainWorker pid=123, ip=10.0.0.1)\x1b[0m step {n} loss {loss}",
        "[step {n}/100]\n    train/CrossEntropyLoss={loss}\n    eval/c4/CrossEntropyLoss=99.5",
        "0: step {n} loss {loss}",
        "[rank0]: step {n} 10% loss {loss}",
        "batch {n}/20 [50%] epoch 3 loss {loss}",
        "saving step {n}\niter {n} loss {loss}",
        '{{"step": "{n}", "loss": "{loss}"}}',
    ],
)
def test_steps_and_losses_of_a_script(form: str) -> None:
    steps, losses, _ = read(rows(form))
    assert (steps, [loss.strip("'\"") for loss in losses]) == (list(range(1, 11)), LOSSES)


@pytest.mark.parametrize(
    "form",
    [
        "eval step {n} loss {loss}",
        "step {n} val_loss {loss}",
        "step {n} validation loss: {loss}",
        "{{'loss': '{loss}', 'grad_norm': '0.67', 'epoch': '{n}'}}",
        "Epoch {n} loss {loss}",
        "Epoch {n}/10: loss {loss}",
        "step done {n}%",
    ],
)
def test_an_evaluation_an_epoch_and_a_share_are_no_steps(form: str) -> None:
    assert derive(rows(form).splitlines()) is None


def test_a_number_with_a_power_is_a_step() -> None:
    one = derive([f"step {n}00.0 loss 2" for n in range(1, 10)] + ["step 1e+03 loss 2"])
    assert one is not None and one.steps == 10


def test_of_two_numbers_with_a_total_the_one_that_begins_again_is_the_step() -> None:
    lines = [f"{e}/9 x {n}/20 y loss 1.5" for e in range(1, 4) for n in range(1, 21)]
    one = derive(lines)
    assert one is not None and one.counted
    match = rules.Forms(one.progress).step_in(lines[-1])
    assert match is not None
    assert match.groupdict() == {"epoch": "3", "step": "20", "of": "20", "loss": "1.5"}


@pytest.mark.parametrize(
    "form",
    [
        "Epoch: [{e}/90][{b}/200] loss 1.5",
        "Epoch: [{e}]  [{b:3}/200]  eta: 0:00:10  loss: 1.5 (1.6)",
        "[Epoch {e}/90] [Batch {b}/200] [loss: 1.5]",
        "| epoch {e} | {b}/ 200 batches | lr 5.00 | loss  1.5 | ppl 150.0",
        "Train: [{e}/90][{b}/200] loss 1.5",
        "INFO - ep {e} step {b} of 200: loss=1.5",
        "Train Epoch: {e} [{b}/200 (5%)] Loss: 1.5",
    ],
)
def test_the_epoch_is_never_the_step(form: str) -> None:
    lines = [form.format(e=e, b=b) for e in (1, 2, 3) for b in range(10, 201, 10)]
    one = derive(lines)
    assert one is not None and one.counted
    match = rules.Forms(one.progress).step_in(lines[-1])
    assert match is not None and (match["epoch"], match["step"], match["of"]) == ("3", "200", "200")


def test_several_runs_in_a_log_are_no_epochs(tmp_path: Path) -> None:
    lines = [f"iteration: {n} / 378950 | lm_loss: 11.2" for n in [*range(1, 10), *range(1, 20)]]
    one = derive(lines)
    assert one is not None and (one.epochs, one.total) == (False, 378950)
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    found = try_lines(lines_of(tmp_path / "log"), PRESETS["nanotron"], 378950)
    assert not found.wrong and "several runs" in found.notes[0]


def test_lines_that_change_their_form_are_said(tmp_path: Path) -> None:
    lines = [
        "Epoch 0: " + BAR.format("15/60", "loss=2"),
        "Training: " + BAR.format("16/?", "loss=2"),
    ]
    (tmp_path / "log").write_text("".join(lines))
    found = try_lines(lines_of(tmp_path / "log"), PRESETS["lightning"], 60)
    assert found.steps == [15, 16] and "change their form at step 16" in found.notes[0]
    lines = [f"iter {n}: loss 2.5\n" for n in range(1, 5)]
    lines += [f"step {n} now with loss 2.5\n" for n in range(5, 10)]
    (tmp_path / "log").write_text("".join(lines))
    found = try_lines(lines_of(tmp_path / "log"), PRESETS["nanogpt"], 60)
    assert "after step 4 the lines changed their form" in found.wrong[0]


def test_every_row_of_the_table_is_complete() -> None:
    for one in FRAMEWORKS:
        assert bool(one.preset) == bool(one.forms), one.name
        assert all(form.source for form in one.forms), one.name
