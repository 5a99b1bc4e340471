"""What a person sees in a terminal of 80 and of 60 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands.terminal import lines_in_terminal
from tests.support.pages.sample_results import build, empty
from trainchaos.chaos.columns import shown
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.reports import html, markdown
from trainchaos.reports.outlets.terminal import summary

pytestmark = pytest.mark.slow
TO_COPY = ("report  ", "again   ", "judge   ", "seal    ", "to install")
"""Lines with a command or a path, which stay whole."""


@pytest.mark.parametrize("columns", [pytest.param(80, marks=pytest.mark.long), 60])
@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=pytest.mark.long) for one in ("list faults", "stacks list")]
    + ["list"],
)
def test_lists_fit(columns: int, command: str, tmp_path: Path) -> None:
    lines = lines_in_terminal(columns, *command.split(), at=tmp_path)
    assert len(lines) > 10
    long = [one for one in lines if shown(one) > columns and not one.startswith(TO_COPY)]
    # a path that is longer than the line is not broken
    assert [one for one in long if len(one.split()) > 1] == []


@pytest.mark.parametrize("columns", [pytest.param(80, marks=pytest.mark.long), 60])
def test_a_run_says_when_and_where_and_fits(columns: int, tmp_path: Path) -> None:
    scenario = "scenarios/kill-one-rank.yaml"
    only = ("--cell", "recovery=drop-replica", "--repeat", "1")
    lines = lines_in_terminal(
        columns, "run", scenario, "--launcher", "sim", "--runs", str(tmp_path), *only
    )
    text = re.sub(r" *\n {6}(?=\S)", "  ", "\n".join(lines))  # folded lines begin with six spaces
    for what in ("✗ process-kill hits", "! detected: exit", "↻ generation 2"):
        said = [one for one in text.splitlines() if what in one]
        assert len(said) == 2, what
        for line in said:
            assert re.match(
                r" +\d\.\d\ds \[\d/4\] +recovery=drop-replica\S*\.r0\.faulted +\S ", line
            )
    mine = [one for one in lines if "recovery=drop-replica.r0.faulted" in one]
    assert mine, "the arm is named in full"
    tables = [one for one in lines if not one.startswith(TO_COPY)]
    assert [one for one in tables if shown(one) > columns and len(one.split()) > 1] == []
    text = " ".join(lines)
    assert re.search(r"recovery:? +0\.0\d+ s", text) and "PASS, simulated" in text


@pytest.mark.long
def test_the_newest_bar_is_seen_in_a_low_terminal(tmp_path: Path) -> None:
    scenario = "scenarios/kill-one-rank.yaml"
    argv = ("run", scenario, "--launcher", "sim", "--runs", str(tmp_path), "--repeat", "2")
    lines = lines_in_terminal(80, *argv, rows=10)
    assert any(re.match(r" *14/14 \S+ +\S+ +\d+/100 ", one) for one in lines)


def test_the_summary_in_a_file_is_as_wide_as_it_needs(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run")
    wide = summary(results, run)
    assert max(map(len, wide.splitlines())) > 120
    for width in (80, 60):
        folded = summary(results, run, width=width).splitlines()
        assert [one for one in folded if shown(one) > width and not one.startswith(TO_COPY)] == []
        flat = "".join("".join(folded).split())
        for failing in ("observednever", "n=3", "kill-one-rank.yaml:14", "max<5s", "FAIL(exit1)"):
            assert failing in flat


def test_steps_lost_that_are_a_bound_are_shown_as_one(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run")
    unsure = [i.model_copy(update={"steps_lost_unsure": "at most"}) for i in results.faults]
    bounds = results.model_copy(update={"faults": unsure})
    for text in (summary, lambda *given: markdown.render(given[1], given[0]).read_text()):
        assert re.search(r"≤ \d", text(bounds, run))
        assert not re.search(r"≤ \d", text(results, run))


@pytest.mark.parametrize("others", ["", "other programs used 1.8 of 2 cores as it began"])
def test_a_busy_machine_is_named_beside_the_verdict(tmp_path: Path, others: str) -> None:
    update = {"system": {"busy": others}, "verdict": "fail"}
    run, results = RunDirectory(tmp_path), empty().model_copy(update=update)
    texts = [summary(results, run)]
    for page in (markdown.render(run, results), html.render(run, results)):
        texts.append(page.read_text().split("System</h2>")[0])
    for text in texts:
        assert ("other programs used 1.8 of 2 cores as it began" in text) == bool(others)


def test_arms_beside_other_programs_are_counted_beside_the_verdict(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run")
    assert "other programs" not in summary(results, run)
    arms = [one.model_copy(update={"others": 0.5 + i}) for i, one in enumerate(results.arms[:2])]
    results = results.model_copy(update={"arms": [*arms, *results.arms[2:]]})
    said = (
        f"other programs used much of the machine in 2 of {len(results.arms)} arms, at most 1.5"
        f" cores in {arms[1].id}"
    )
    assert said in summary(results, run)
