"""Expressions derived from lines, and the proposal that is made of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.script.test_progress_presets import LINES
from trainchaos.chaos.scenario.frameworks import FRAMEWORKS
from trainchaos.chaos.scenario.progress import PresetProgress, RegexProgress
from trainchaos.harness.draft.progress import Proposal, propose
from trainchaos.harness.draft.watch import Sighting
from trainchaos.harness.script.listen.derive import derive, grows
from trainchaos.harness.script.listen.progress import ProgressReport
from trainchaos.harness.script.listen.rules import Forms


def rows(line: Callable[[int], str], count: int = 10) -> list[str]:
    """Lines of the steps from 1 on."""
    return [line(step) for step in range(1, count + 1)]


def found(lines: list[str]) -> tuple[list[int], list[str]]:
    """Steps and losses that the derived expression finds."""
    one = derive(lines)
    assert one is not None
    forms = Forms(one.progress)
    matches = [match for line in lines if (match := forms.step_in(line))]
    steps = [int(match["step"].replace(",", "")) for match in matches]
    if one.loss:
        return steps, [match["loss"] for line in lines if (match := re.search(one.loss, line))]
    return steps, [match.groupdict().get("loss") or "" for match in matches]


STEPS = list(range(1, 11))


@pytest.mark.parametrize(
    "line",
    [
        lambda n: f"step {n}/60 loss {1 / n:.3f}",
        lambda n: f"<< it#{n:05d} >> train_loss={1 / n:.3f} | dt 12ms",
        lambda n: f"2026-11-25 09:00:{n:02d},123 INFO trainer.py:88 iter={n} loss: {1 / n:.3f}",
        lambda n: f"[{n} steps] loss = {1 / n:.3f}, lr 1e-4",
        lambda n: f'{{"step": {n}, "loss": {1 / n:.3f}, "tokens": 1234}}',
        lambda n: f"loss {1 / n:.3f} at iteration {n} (gpu 0)",
        lambda n: f"train {n}/5000 ({2 * n}%) loss: {1 / n:.3f}",
        lambda n: f"\x1b[32mstep {n}\x1b[0m loss {1 / n:.3f}",
        lambda n: f"step {n} loss {1 / n:.3f}" + (" saved" if n % 3 == 0 else ""),
        lambda n: f"global_step={n:,} epoch=0 loss={1 / n:.3f}",
    ],
)
def test_steps_and_losses_are_found_in_a_line(line: Callable[[int], str]) -> None:
    lines = ["loading 3 of 4 shards", *rows(line), "done in 12 s"]
    assert found([re.sub(r"\x1b\[\d+m", "", one) for one in lines]) == (
        STEPS,
        [f"{1 / n:.3f}" for n in STEPS],
    )
    assert derive(lines) is not None


@pytest.mark.parametrize(
    ("lines", "steps", "losses"),
    [
        (rows(lambda n: f"step {n} loss nan"), STEPS, ["nan"] * 10),
        (rows(lambda n: f"iter {10 * n} loss 2.5"), [10 * n for n in STEPS], ["2.5"] * 10),
        (
            [text for n in STEPS for text in (f"Iteration: {n}", f"   loss: {n}.5")],
            STEPS,
            [f"{n}.5" for n in STEPS],
        ),
        (
            [text for n in STEPS for text in (f"step {n} loss 1.5", f"eval step {99 - n} loss 3")],
            STEPS,
            ["1.5"] * 10,
        ),
        (
            [
                text
                for n in STEPS
                for text in (
                    f"[train] step {n}/80 loss={n}.5",
                    *(f"[eval] step {m}/3 loss=9" for m in range(1, 4) if n % 5 == 0),
                )
            ],
            STEPS,
            [f"{n}.5" for n in STEPS],
        ),
        (
            [f"[rank{rank}]: step {n} loss 1.5" for n in STEPS for rank in (0, 1)],
            [n for n in STEPS for _ in (0, 1)],
            ["1.5"] * 20,
        ),
    ],
    ids=["nan", "every tenth", "a line of its own", "evaluation", "evaluation's count", "ranks"],
)
def test_steps_and_losses_are_found_in_lines(
    lines: list[str], steps: list[int], losses: list[str]
) -> None:
    assert found(lines) == (steps, losses)


@pytest.mark.parametrize("lag", [1, 3, 7])
def test_a_rank_that_lags_begins_no_epoch(lag: int) -> None:
    steps = [n for at in range(1, 20) for n in (at, at - lag) if 1 <= n <= 12]
    one = derive([f"step {n}" for n in steps])
    assert one is not None and not one.epochs


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["hello", "loading 3 of 4"],
        ["step 1", "step 2"],
        rows(lambda n: f"2026-11-25 09:00:{n:02d} still here"),
        rows(lambda n: f"step {n * n * 7 % 11} of something"),
        rows(lambda n: f"retry after step 5, attempt {n}"),
    ],
)
def test_nothing_is_made_of_lines_without_steps(lines: list[str]) -> None:
    assert derive(lines) is None


def test_an_epoch_beside_a_step_that_begins_again_is_found() -> None:
    lines = [f"Epoch {e} step {n}/5 loss 1.5" for e in range(3) for n in range(1, 6)]
    one = derive(lines)
    assert one is not None and one.epochs and one.counted and not one.one_epoch
    match = re.search(one.regex, lines[-1])
    assert match is not None and match.groupdict() == {
        "epoch": "2",
        "step": "5",
        "of": "5",
        "loss": "1.5",
    }


@pytest.mark.parametrize(
    ("line", "one"),
    [
        ("epoch 1 step {n} loss 1.5", True),
        ("epoch 1 global_step {n} loss 1.5", False),
        ("step {n} loss 1.5", False),
    ],
)
def test_a_step_may_begin_again_while_one_epoch_was_seen(line: str, one: bool) -> None:
    found = derive(line.format(n=n) for n in STEPS)
    assert found is not None and found.one_epoch is one


def proposed(text: str, folder: Path, *names: str, steps: int | None = None) -> Proposal:
    """Of lines that came one a second, of a script with these frameworks."""
    seen = Sighting()
    seen.lines.extend((float(at), line) for at, line in enumerate(re.split(r"[\r\n]", text)))
    return propose(seen, [one for one in FRAMEWORKS if one.name in names], steps=steps)


@pytest.mark.parametrize("name", sorted(LINES))
def test_the_lines_of_a_framework_are_read_by_its_preset(name: str, tmp_path: Path) -> None:
    text, reports = LINES[name]
    names = [one.name for one in FRAMEWORKS if one.preset == name]
    got = proposed(text, tmp_path, *names)
    if len({step for step, _ in reports}) < 2:  # one line is no progress
        assert got.progress is None
        return
    assert isinstance(got.progress, PresetProgress), got
    assert [step for _, step in got.steps] == [step for step, _ in reports]
    if not names:
        assert got.progress.preset in (name, "hf")  # of a bar alone both find the same


def test_odd_lines_are_read_by_a_derived_expression(tmp_path: Path) -> None:
    text = "\n".join(rows(lambda n: f"<< it#{5 * n:05d}/00200 >> loss~{1 / n:.3f}"))
    got = proposed(text, tmp_path)
    assert isinstance(got.progress, RegexProgress)
    assert (got.total, got.stride, got.losses, got.doubt) == (200, 5, 10, "")
    assert got.step_s == pytest.approx(0.2)
    assert (got.first_s, got.longest_s) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "steady"),
    [
        ([1, 2, 3], True),
        ([1, 1, 2, 2, 3, 3], True),
        ([10, 20, 30, 40, 80, 90, 100], True),
        ([1, 2], False),
        ([3, 2, 1], False),
        ([1, 5, 6, 20], False),
        ([10, 11, 12, 13, 14, 15, 3], False),
        ([7, 7, 7], False),
    ],
)
def test_what_grows_steadily(values: list[int], steady: bool) -> None:
    assert grows(values) is steady


def test_few_steps_of_the_run_are_better_than_many_of_an_epoch(tmp_path: Path) -> None:
    lines = []
    for epoch in range(1, 5):
        lines += [f"{n}/20 [00:01<00:19, 1.0it/s, loss=2.5]" for n in range(1, 21)]
        lines += [f"step {20 * epoch} done"]
    got = proposed("\n".join(lines), tmp_path)
    assert (got.distinct, got.doubt) == (4, ""), got
    assert isinstance(got.progress, RegexProgress)


def test_a_doubt_is_said(tmp_path: Path) -> None:
    lines = [f"step {n}/5 loss 1.5" for _ in (1, 2) for n in range(1, 6)]
    assert "begins again in each epoch" in proposed("\n".join(lines), tmp_path).doubt
    lines = [f"epoch {e} step {n}/5 loss 1.5" for e in (7, 8) for n in range(1, 6)]
    assert "the first epoch seen is 7" in proposed("\n".join(lines), tmp_path).doubt
    lines = [f"epoch {e} step {n} loss 1.5" for e in (0, 1) for n in range(0, 100, 10)]
    got = proposed("\n".join(lines), tmp_path)
    assert got.per_epoch == 100 and "epoch_steps: 100 is a guess" in got.doubt
    beyond = proposed("\n".join(rows(lambda n: f"step {n}")), tmp_path, steps=5)
    assert "step 10 is beyond" in beyond.doubt


def test_a_bar_of_each_epoch_may_count_epochs_from_1(tmp_path: Path) -> None:
    lines = [f"Epoch {e}: {n}/5 [00:01, loss=1.5]" for e in (1, 2) for n in range(6)]
    got = proposed("\n".join(lines), tmp_path)
    # that of 0 is drawn before the first step of its epoch, and is none
    assert [step for _, step in got.steps] == list(range(1, 11))


def test_the_first_epoch_is_not_known_of_the_end_of_a_log(tmp_path: Path) -> None:
    lines = [f"epoch {e} step {n} loss 1.5" for e in (1, 2) for n in range(1, 6)]
    seen = Sighting(count=len(lines) + 5)
    seen.lines.extend((1.0, line) for line in lines)
    assert "epochs_from" in propose(seen, [], steps=None).doubt


def test_the_beacon_is_preferred(tmp_path: Path) -> None:
    seen = Sighting(first_report_s=3.0)
    seen.lines.extend((float(n), f"step {n} loss 1.5") for n in STEPS)
    seen.reports.extend(
        ProgressReport(step=n, rank=n % 2, pid=1, loss=0.5, time_ns=n * 500_000_000) for n in STEPS
    )
    got = propose(seen, [], steps=None)
    assert (got.progress, got.first_s, got.losses, got.ranks) == ("beacon", 3.0, 10, {0, 1})
    assert got.step_s == pytest.approx(0.5)
