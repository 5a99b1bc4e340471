"""Every report shows every metric, the times until the job is whole, and the rates with their
bounds.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.support.pages.sample_results import build
from trainchaos import reports
from trainchaos.chaos.units import MISSING
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.measure.measure import summarise
from trainchaos.harness.judge.measure.samples import PossibleValues
from trainchaos.harness.judge.results import FalseAlarms, Reliability, Results, Spares, Survival
from trainchaos.reports.content.figures import alarms, median_of
from trainchaos.reports.outlets.terminal import summary
from trainchaos.reports.page.tables import lost_steps

RATES = Reliability(
    survival=Survival(arms=3, survived=2, probability=2 / 3, low=0.0943, high=0.9916),
    false_alarms=FalseAlarms(count=0, rank_hours=0.05, rate=0.0, upper=59.9),
    spares=Spares(
        provisioned=2,
        idle_rank_hours=0.025,
        share=1 / 3,
        measured=2,
        memory_mib=312.0,
        cores=0.0123,
    ),
)
Shown = tuple[RunDirectory, Results]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A run whose first cell has rates, a time until it is whole, and no utilisation."""
    run, results = build(tmp_path_factory.mktemp("runs") / "run", logs=False)
    cell = results.cells[0]
    metrics = {
        **cell.metrics,
        "time_to_full_rate": summarise("time_to_full_rate", [1.25, 1.5, 1.75]),
        "time_to_redundancy": summarise("time_to_redundancy", [7.25, 7.5, math.inf]),
        "failure_cost": summarise("failure_cost", [0.5, 0.5, 0.5]),
        "mfu": summarise("mfu", []),
    }
    told = {
        "metrics": metrics,
        "reliability": RATES,
        "absent": {"mfu": "no peak is stated for processors"},
    }
    faults = [
        i.model_copy(update={"time_to_full_rate": 1.25, "time_to_redundancy": math.inf})
        for i in results.faults
    ]
    results = results.model_copy(
        update={"cells": [cell.model_copy(update=told), *results.cells[1:]], "faults": faults}
    )
    reports.render_all(run, results)
    return run, results


def test_results_are_read_back_with_rates_and_hits(shown: Shown) -> None:
    text = shown[1].model_dump_json()
    assert (
        Results.model_validate_json(text) == shown[1] and '"time_to_redundancy":"Infinity"' in text
    )


def test_the_page_shows_them(shown: Shown) -> None:
    page = _file(shown, "report.html")
    for words in (
        "full rate",
        "redundant",
        "2 of 3",
        "66.7 % [9.43 %",
        "too few hours (3 needed), below 59.9 with 95 %",
        "needs 6 repeats",
        "needs 59 repeats",
        "mfu is absent: no peak is stated for processors",
        "rank-hours",
        "312",
        "33.3 %",
    ):
        assert words in page, words


def test_the_summary_shows_them(shown: Shown) -> None:
    text = _file(shown, "summary.md").replace("\\", "")
    head = next(line for line in text.splitlines() if line.startswith("| strategy | recovery"))
    row = text.splitlines()[text.splitlines().index(head) + 2]
    cells = dict(
        zip((c.strip() for c in head.split("|")), (c.strip() for c in row.split("|")), strict=True)
    )
    assert (cells["full rate (s)"], cells["redundant (s)"]) == ("1.50", "7.50")
    assert cells["cost (rank-hours)"].startswith("0.5")
    for words in (
        "### Metrics",
        "time_to_redundancy",
        "needs 299 repeats",
        "### Rates over all arms",
        "too few hours (3 needed), below 59.9",
    ):
        assert words in text, words


def test_a_terminal_shows_them(shown: Shown) -> None:
    run, results = shown
    text = summary(results, run)
    assert "full rate" in text and "redundant" in text and "1.50 s" in text and "7.50 s" in text
    assert "mfu is absent: no peak is stated for processors" in text
    assert (
        "a failure costs 0.500 rank-hours" in text
        and "recovery p95 needs 59 repeats, p99 needs 299 repeats" in text
    )
    assert "survived 2 of 3, 66.7 % [9.43 %" in text
    assert (
        "false alarms 0 in 0.05" in text
        and "(per hour: too few hours (3 needed), below 59.9 with 95 %)" in text
    )
    assert "2 spares: 33.3 % of the rank time, 312 MiB and 0.0123 cores each" in text


def test_collectors_get_them(shown: Shown) -> None:
    text = _file(shown, "metrics.prom")
    for words in (
        "trainchaos_survival_ratio{",
        'statistic="low"} 0.0943',
        "trainchaos_false_alarms{",
        "} 59.9",
        "trainchaos_spare_memory_bytes{",
        "trainchaos_time_to_redundancy_seconds{",
        "trainchaos_failure_cost_rank_hours{",
    ):
        assert words in text, words
    assert "trainchaos_mfu" not in text.replace('metric="mfu"', "")


def test_steps_that_another_rollback_answered_are_said_to_be_with_it(shown: Shown) -> None:
    incident = shown[1].faults[0]
    assert (
        lost_steps(incident.model_copy(update={"answered_with": "first", "recovery_time": 1.0}))
        == "with first"
    )
    assert lost_steps(incident.model_copy(update={"recovery_time": math.inf})) == "all"


def _file(shown: Shown, name: str) -> str:
    return Path(shown[0].root / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_fewer_values_than_there_could_be_are_said_everywhere(tmp_path: Path) -> None:
    """A table that says n = 3 has three values, or says of how many."""
    run, results = build(tmp_path / "run", logs=False)
    fewer = PossibleValues(values=5, arms=4)
    names = ("recovery_time", "goodput", "failure_cost", "time_to_full_rate")
    told = {name: summarise(name, [1.25, 1.5], possible=fewer) for name in names}
    cells = [
        cell.model_copy(update={"metrics": told, "reliability": RATES}) for cell in results.cells
    ]
    slas = [
        s.model_copy(update={"values": [1.25, 1.5], "of": 5, "of_arms": 4}) for s in results.slas
    ]
    results = results.model_copy(update={"cells": cells, "slas": slas})
    reports.render_all(run, results)
    terminal = summary(results, run)
    assert (
        "1.38 s (2 of 5)" in terminal
        and "rank-hours (2 of 5)" in terminal
        and "n=2 of 5" in terminal
    )
    text = (run.root / "summary.md").read_text().replace("\\", "")
    head, *rows = (
        line.split("|")
        for line in text.splitlines()
        if line.startswith("| strategy | recovery") or "n = 2 of 5" in line
    )
    recovery = [c.strip() for c in head].index("recovery (s, median)")
    assert "n = 2 of 5" in rows[0][recovery], "the strategies' table"
    assert any("2 of 4" in row for row in text.splitlines()), "arms of a metric"
    assert "n=2 of 5" in (run.root / "junit.xml").read_text()
    page = (run.root / "report.html").read_text()
    assert (
        "(2 of 5)" in page and "2 of 4" in page and "n = 2 of 5" in page and "2 of 5 values" in page
    )
    assert re.search(
        r'metric_values_possible\{[^}]*metric="goodput"\} 5',
        (run.root / "metrics.prom").read_text(),
    )
    read = Results.model_validate_json(results.model_dump_json())
    assert read.cells[0].metrics["goodput"].counted == "2 of 5" and read.slas[0].counted == "2 of 5"


def test_all_values_there_could_be_are_a_plain_number() -> None:
    whole = summarise("goodput", [0.5, 0.75], possible=PossibleValues(values=2, arms=2))
    assert (whole.counted, median_of(whole)) == ("2", "0.625")
    assert median_of(summarise("goodput", [], possible=PossibleValues(values=2, arms=2))) == MISSING


def test_a_rate_of_enough_hours_is_stated() -> None:
    told = FalseAlarms(count=0, rank_hours=4.1, rate=0.0, upper=0.74)
    assert told.enough and not told.model_copy(update={"rank_hours": 2.9}).enough
    assert alarms(told)[2] == "0, below 0.740 with 95 %"
    few = told.model_copy(update={"rank_hours": 2.9, "count": 1, "rate": 0.3})
    assert alarms(few)[2] == "too few hours (3 needed), below 0.740 with 95 %"
