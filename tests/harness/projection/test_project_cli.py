"""``chaos project``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.judge.test_stored_runs import STORED
from tests.support.pages.html_page import Page
from tests.support.pages.sample_results import build
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.projection.costs import PUBLISHED, measured
from trainchaos.harness.projection.laws import Duration
from trainchaos.harness.projection.projection import project
from trainchaos.harness.projection.result import APART, Projection, Setting, t95
from trainchaos.reports.projection import words

SMALL = ("--trials", "20", "--days", "6", "--gpus", "64", "--gpus", "4096", "-q")
TINY = (
    *["--trials", "5", "--days", "1", "--gpus", "64", "--strategy", "hot-spare", "--jobs", "1"],
    "-q",
)
RUNS = ("kill-one-rank", "nan-gradient")
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chaos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Say:
    """Runs ``chaos project`` in a folder of its own: exit code, standard output, error."""
    monkeypatch.chdir(tmp_path)

    def invoked(*argv: str) -> tuple[int, str, str]:
        code = invoke(["project", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoked


@pytest.mark.slow
def test_a_projection_is_printed_written_and_says_what_it_rests_on(
    chaos: Say, tmp_path: Path
) -> None:
    code, said, _ = chaos(*SMALL, "--preset", "llama3", "--price", "2.5")
    assert code == 0
    for text in ("419 unexpected interruptions", "requeue at 2,048 GPUs", "in the denominator"):
        assert text in said
    stored = Projection.model_validate_json((tmp_path / "projection/results.json").read_text())
    assert [(row.gpus, row.strategy) for row in stored.rows] == [
        (gpus, name) for gpus in (64, 4096) for name in PUBLISHED
    ]
    for row in stored.rows:
        assert row.low <= row.goodput <= row.high and row.worst <= row.best
        assert row.goodput + sum(row.badput.values()) == pytest.approx(1.0)
        assert row.price == pytest.approx(2.5 * row.gpu_hours)
        assert row.apart is not None and row.apart < APART
        assert f"{row.goodput:.4f}" in said
    text = (tmp_path / "projection/report.html").read_text()
    read = Page(text)
    assert "Projected, not measured" in text and words.headline(stored) in text
    assert text.count('<svg class="plot"') == 2 and read is not None
    setting = text[text.index('id="setting"') :]
    assert "64, 4096" in setting and "None" not in setting


def test_given_costs_and_growth_are_taken(chaos: Say) -> None:
    more = ("--stall", "hot-spare=10s", "--growth", "2s", "--strategy", "hot-spare")
    _, said, _ = chaos(*SMALL, "--format", "json", *more)
    stalls = {row["nodes"]: row["stall_s"] for row in json.loads(said)["rows"]}
    assert stalls == {8: pytest.approx(16.0), 512: pytest.approx(28.0)}  # log2(8), log2(512)


def test_free_spares_raise_goodput_by_their_share(chaos: Say) -> None:
    def goodput(*more: str) -> float:
        options = ("--spares", "8", "--format", "json", *more)
        return float(json.loads(chaos(*TINY, *options)[1])["rows"][0]["goodput"])

    assert goodput("--spares-free") / goodput() == pytest.approx(2.0)  # 8 beside 8 nodes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rate", "0"), "--rate"),
        (("--rate", "2", "--preset", "mid"), "both say how often"),
        (("--preset", "unknown"), "'unknown' is not one of"),
        (("--gpus", "100000000000"), "--gpus"),
        (("--stall", "hot-spare"), "STRATEGY=DURATION"),
        (("--stall", "hot-spare=soon"), "not a duration"),
        (("--stall", "unknown=1s"), "no strategy unknown"),
        (("--strategy", "unknown"), "no costs of unknown"),
        (("--several", "0.5,0.6"), "sum to 1"),
        (("--several", "0.5,nan"), "sum to 1"),
        (("--several", "a"), "not a list of numbers"),
        (("--several", "1.5,-0.5"), "sum to 1"),
        (("--repair", "-4h"), "duration"),
        (("--repair", "0s"), "write more than 0s"),
        (("--interval", "1e308s"), "longer than a hundred years"),
        (("--interval", "19s"), "checkpoints are 19 s apart, a step takes 20 s"),
        (("--replica-nodes", "9"), "a copy of the model takes 9 nodes, the job has 8 (64 GPUs)"),
        (("--spares", "9"), "9 spares for a job of 8 nodes (64 GPUs)"),
        (("--stall", "hot-spare=1s", "--stall", "hot-spare=2s"), "hot-spare is given twice"),
        (("--slow-found", "5m"), "--slow-found is of --slow-rate"),
        (("--slow-factor", "2"), "--slow-factor is of --slow-rate"),
        (("--checkpoint-size", "1TB"), "--checkpoint-size and --bandwidth go together"),
        (("--bandwidth", "1GB"), "not a size a second"),
        (("--checkpoint-size", "0B"), "is not between"),
        (
            ("--checkpoint-size", "1TB", "--bandwidth", "1GB/s", "--save", "1s", "--load", "1s"),
            "leave nothing for --checkpoint-size",
        ),
        (
            ("--checkpoint-size", "1TB", "--bandwidth", "1GB/s", "--times-of-runs"),
            "both say what a save is",
        ),
        (("--times-of-runs",), "--times-of-runs is of --runs"),
        (("--rework", "never"), "--rework"),
        (("--runs", "nowhere"), "nowhere"),
        (("--weibull", "nan"), "--weibull"),
        (("--days", "inf"), "--days"),
        (("--trials", "1"), "--trials"),
    ],
)
def test_what_cannot_be_is_refused(
    chaos: Say, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    code, _, error = chaos("--gpus", "64", *options)
    assert code == 2 and says in error and "Traceback" not in error
    assert not (tmp_path / "projection").exists()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs of before, by name: their directories, which nobody writes to."""
    found = {}
    for archive in STORED:
        folder = tmp_path_factory.mktemp("stored") / archive.name.partition(".")[0]
        if folder.name in RUNS:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            found[folder.name] = str(next(folder.iterdir()))
    return found


@pytest.mark.slow
def test_runs_that_do_not_fit_together_or_are_not_whole_are_refused(
    chaos: Say, stored: dict[str, str], tmp_path: Path
) -> None:
    one, other = stored["kill-one-rank"], stored["nan-gradient"]
    code, _, error = chaos(*SMALL, "--runs", one, "--runs", other)
    assert code == 2 and "of different scenarios: kill-one-rank, " in error
    torn = shutil.copytree(one, tmp_path / "torn")
    log = min((torn / "events").glob("*hot-spare*.faulted/w*.jsonl"))
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:20] + lines[21:]))
    code, _, error = chaos(*SMALL, "--runs", str(torn))
    assert code == 2 and "hot-spare.r0.faulted is not whole" in error


@pytest.mark.slow
def test_a_run_given_twice_does_not_count_twice(
    chaos: Say, stored: dict[str, str], tmp_path: Path
) -> None:
    one = stored["kill-one-rank"]
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    for option in ("--runs", "--compare"):
        for again in (one, str(copy)):
            code, _, error = chaos(*SMALL, option, one, option, again)
            assert code == 2 and "is the same run as" in error


def test_a_preset_is_of_nodes_of_eight_gpus(chaos: Say) -> None:
    """As many failures of as many GPUs, however they are put into nodes; a size counts once."""
    some = ("--gpus", "4096", "--gpus", "4096", "--trials", "100", "-q", "--strategy", "hot-spare")
    failures = []
    for each_has in ("8", "4", "64"):
        said = chaos(*some, "--gpus-per-node", each_has, "--format", "json")[1]
        found = Projection.model_validate_json(said)
        assert ("scaled from nodes of 8" in found.failures_from) == (each_has != "8")
        failures += [row.failures for row in found.rows]
    assert failures == pytest.approx([failures[0]] * 3, rel=0.05)


def test_why_there_is_no_formula_is_said_once_for_each_strategy(chaos: Say) -> None:
    small = ("--trials", "2", "--days", "0.1", "--gpus", "4096", "--gpus-per-node", "1024", "-q")
    _, said, _ = chaos(*small, "--failures-while", "always")
    assert said.count("the formulas hold for failures while the job runs") == len(PUBLISHED)


def test_a_directory_that_cannot_be_written_is_an_error(chaos: Say, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, error = chaos(*TINY, "--into", "file/below")
    assert code == 4 and "cannot write to file/below" in error and "--into" in error


def test_an_interval_has_in_it_what_is_not_known_of_the_mean_recovery() -> None:
    """Of recoveries that were measured; those given or published are taken as exact."""
    stall = Duration(median_s=300.0, sigma=0.4)
    few, many = (
        replace(PUBLISHED["hot-spare"], stall=stall, incidents=n, per_doubling_s=0.0)
        for n in (5, 500)
    )
    given = replace(few, incidents=0)
    setting = Setting(gpus=(4096,), rate=6.5, days=30, trials=200)
    (row,), (sure,), (exact,) = (
        project(setting, {"hot-spare": one}, "a test").rows for one in (few, many, given)
    )
    assert exact.high - exact.goodput == pytest.approx(t95(199) * exact.error)
    # 2.776: Student's t of 4 degrees of freedom
    share = math.expm1(2.776445 * math.sqrt(0.4**2 / 5 + 0.4**4 / 8))
    stalled = row.failures * stall.mean_s / (30 * 86_400) / (1 + 2 / 512)
    assert row.high - row.goodput == pytest.approx(
        math.hypot(t95(199) * row.error, share * stalled), rel=1e-6
    )
    assert row.high - row.low > 5 * (sure.high - sure.low)
    assert row.apart == exact.apart, "the engines agree as they did"


def test_runs_without_a_recovery_have_no_costs(tmp_path: Path) -> None:
    _, results = build(tmp_path / "run")
    with pytest.raises(ScenarioError, match="no run has a failure"):
        measured([results.model_copy(update={"faults": []})])


@pytest.mark.parametrize(
    ("options", "gpus"),
    [(("--spares", "5000"), {65_536, 131_072}), (("--replica-nodes", "9000"), {131_072})],
)
def test_sizes_begin_where_there_are_enough_nodes(
    chaos: Say, options: tuple[str, ...], gpus: set[int]
) -> None:
    code, said, _ = chaos(*options, "--trials", "2", "--days", "0.01", "-q", "--format", "json")
    assert code == 0 and {row["gpus"] for row in json.loads(said)["rows"]} == gpus


def test_where_no_size_is_large_enough_that_is_said(chaos: Say) -> None:
    code, _, error = chaos("--gpus-per-node", "1024", "--spares", "200", "-q")
    assert code == 2 and "GPUs and more, and sizes end at 131,072: say --gpus" in error


def test_spares_are_of_hot_spare_alone(chaos: Say) -> None:
    some = ("--trials", "2", "--days", "0.01", "-q", "--format", "json", "--spares", "17000")
    code, said, _ = chaos(*some, "--strategy", "drop-replica")
    assert code == 0 and len(json.loads(said)["rows"]) == 15
