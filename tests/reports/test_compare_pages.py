"""The pages of a comparison are read back with independent readers, at every size and with every
outcome.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages.html_page import Page, fetches_nothing, regular_tables
from tests.support.pages.sample_comparison import FAMILIES, HOSTILE, REFERENCE, STACKS, build
from trainchaos.chaos.units import percent
from trainchaos.harness.compare.result.model import OUTCOMES, Comparison
from trainchaos.reports.compare import load, write_all
from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.compare.words import findings
from trainchaos.reports.content.figures import survived
from trainchaos.reports.page.charts import AxisScale


class ComparisonPage(Page):
    """Also the drawings, and the sort keys of the cells of each table."""

    def __init__(self, text: str) -> None:
        self.drawings: list[dict[str, str | None]] = []
        self.keys: list[list[list[str]]] = []
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        named = dict(attrs)
        if tag == "svg":
            self.drawings.append(named)
        if tag == "table":
            self.keys.append([])
        if tag == "tr":
            self.keys[-1].append([])
        if tag in ("td", "th") and "data-sort" in named:
            self.keys[-1][-1].append(named["data-sort"] or "")


@pytest.fixture(scope="module", params=[1, 7], ids=["1 trial", "7 trials"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Comparison, Path]:
    """13 stacks under 6 kinds of fault, and where their pages are."""
    comparison, root = build(request.param), tmp_path_factory.mktemp("compare")
    assert [path.name for path in write_all(comparison, root)] == [
        "compare.html",
        "compare.md",
        "compare.json",
    ]
    return comparison, root


Written = tuple[Comparison, Path]


def read(written: Written) -> tuple[str, ComparisonPage]:
    return page_in(written[1])


@cache
def page_in(root: Path) -> tuple[str, ComparisonPage]:
    """Read once: it takes a tenth of a second."""
    text = (root / "compare.html").read_text(encoding="utf-8")
    return text, ComparisonPage(text)


def test_page_is_one_balanced_file_that_fetches_nothing(written: Written) -> None:
    text, page = read(written)
    fetches_nothing(text, page)
    assert page.tags["script"] == 1
    assert all(address.startswith(("#", "data:,")) for address in page.addresses)
    hatches = set(re.findall(r"url\(#([\w-]+)\)", text))
    assert hatches and hatches <= set(page.ids)


def test_every_outcome_is_on_the_page_in_words_and_a_shape(written: Written) -> None:
    comparison, _ = written
    text, _ = read(written)
    worst = {cell.worst for cell in comparison.cells}
    used = worst | {trial.outcome for trial in comparison.trials}
    assert used == set(OUTCOMES)
    for name in used:
        assert f'data-mark="{OUTCOMES[name].mark}"><span>{name}' in text, name


def test_json_is_the_whole_comparison(written: Written) -> None:
    comparison, root = written
    again = load(root / "compare.json")
    assert again.model_dump_json() == comparison.model_dump_json()
    assert math.inf in {trial.recovery for trial in again.trials}


def test_drawings_have_words_and_are_well_formed(written: Written) -> None:
    text, page = read(written)
    for drawing in page.drawings:
        named = drawing.get("role") == "img" and drawing.get("aria-label")
        inside = "x" in drawing and "overflow" in drawing
        assert named or inside or drawing.get("aria-hidden") == "true", drawing
    figures = re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL)
    assert len(figures) > 3 * len(FAMILIES)
    for part in figures:
        ET.fromstring(part)
        assert re.search(r"<figcaption>(<h3>|<b>)\S", part)


def test_every_point_is_drawn(written: Written) -> None:
    comparison, _ = written
    text, _ = read(written)
    strips = re.findall(
        r'<svg class="strip-row".*?</title>(.*?)</svg></svg>', text, flags=re.DOTALL
    )
    drawn = sum(strip.count('class="point') for strip in strips)
    timed = [t for t in comparison.trials if t.recovery is not None and t.label in STACKS]
    assert drawn == len(timed)
    assert sum(strip.count("point out") for strip in strips) == sum(
        t.recovery == math.inf for t in timed
    )


def test_tables_can_be_sorted_and_read_without_the_script(written: Written) -> None:
    text, page = read(written)
    assert page.tags["button"] == 0, "buttons are the script's: without it there are none to click"
    for rows in page.keys:
        head, *body = rows
        assert head == [] and len({len(row) for row in body}) <= 1
    scorecard = page.keys[0]
    assert len(scorecard) == 1 + len(STACKS)
    for column in range(1, 1 + len(FAMILIES)):
        for row in scorecard[1:]:
            assert row[column] == "" or float(row[column]) >= 0
    assert all(f'data-label="{family}"' in text for family in FAMILIES)


def test_hostile_text_stays_text(written: Written) -> None:
    text, page = read(written)
    assert HOSTILE in "".join(page.text)
    assert "<script>alert" not in text


def test_markdown_tables_are_regular_and_hold_the_scorecard(written: Written) -> None:
    comparison, root = written
    text = (root / "compare.md").read_text()
    regular_tables(text)
    assert text.startswith(f"## {REFERENCE}")
    assert all(f"| {label} |" in text for label in STACKS)
    assert comparison.reproduce in text and "committed bad values" in text
    assert "| ETTR |" in text


def test_survival_comes_with_its_bound(written: Written) -> None:
    comparison, root = written
    for name in ("compare.html", "compare.md"):
        text = (root / name).read_text().replace("\\", "")
        for one in (cell.survival for cell in comparison.cells if cell.survival is not None):
            assert f"{one.survived} of {one.arms}: {percent(one.probability or 0.0)} [" in text
            between = re.search(r"\[([0-9.]+) %, ([0-9.]+) %\]", survived(one))
            assert between is not None and between[0] in text
            assert float(between[1]) <= one.low * 100 and one.high * 100 <= float(between[2]) + 1e-6


def test_what_waits_and_whom_a_stack_suspects_is_shown_for_each(written: Written) -> None:
    comparison, root = written
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (root / "compare.md")
        .read_text(encoding="utf-8")
        .split("## While nothing fails")[1]
        .split("\n")[4:]
    ]
    shown = {row[0]: row[1:] for row in rows[: len(comparison.at_rest)]}
    first, third = (comparison.at_rest[n].label for n in (0, 2))
    assert shown[first] == [
        "3",
        "0",
        "0 %",
        "0",
        "2.00",
        "too few hours (3 needed), below 3.50 with 95 %",
    ]
    assert shown[third] == ["3", "2", "40.0 %", "2", "4.00", "0.500, below 3.50 with 95 %"]
    assert "While nothing fails" in read(written)[0]


def test_finding_comes_first_and_says_where_others_are_better() -> None:
    comparison = build(7)
    facts = ComparisonFacts(comparison)
    kept = [facts.kept(label) for label in facts.labels]
    assert kept == sorted(kept, reverse=True) and facts.labels[-1] == "none"
    lines = findings(ComparisonFacts(comparison))
    assert lines[0].startswith(
        f"{REFERENCE} kept the job’s work through 6 of 6 kinds of fault; the best of the others"
    )
    assert any(line.startswith("The fastest other stack takes longer") for line in lines)
    other = comparison.model_copy(update={"reference": "torchrun tuned"})
    said = " ".join(findings(ComparisonFacts(other)))
    assert "Where others are better: " in said and "drop-replica recovers from kill in 0.00" in said
    assert "Nothing was paired" in said or "paired comparisons" in said


def test_fewer_than_six_pairs_are_said_to_prove_nothing_alone() -> None:
    lines = findings(ComparisonFacts(build(1)))
    assert lines[-1].startswith(
        "With fewer than 6 pairs a cell none of this is shown at 95 % confidence."
    )
    several = findings(ComparisonFacts(build(2)))
    assert (
        "none of this is shown" in several[-1]
        and "9 of the 9 others are shown to be slower" in several[-1]
    )


def words_of(comparison: Comparison, root: Path) -> str:
    """All text of its page."""
    write_all(comparison, root)
    page = ComparisonPage((root / "compare.html").read_text())
    assert page.open == []
    return " ".join(page.text)


def test_nothing_ran_is_a_page_too(tmp_path: Path) -> None:
    lists: dict[str, Any] = {name: [] for name in ("trials", "cells", "ratios", "same", "stacks")}
    rest = {"price": None, "machine": {}, "missing": 5, "cautions": ["two machines"]}
    words = words_of(build(1).model_copy(update={**lists, **rest}), tmp_path)
    assert "did not run" in words and "two machines" in words and "5 arms" in words


def test_a_stack_without_measures_has_gaps_not_guesses(tmp_path: Path) -> None:
    comparison = build(1, stacks=3)
    lost = ("steps_lost", "samples_lost", "overhead", "cost_gpu_hours")
    none: dict[str, Any] = dict.fromkeys(("recovery", "detection", "goodput", *lost))
    cells = [c.model_copy(update=none | {"phases": {}}) for c in comparison.cells]
    empty: dict[str, Any] = {"recovery": None, "control_goodput": None}
    empty |= {"phases": [], "losses": (), "badput": {}}
    trials = [t.model_copy(update=empty) for t in comparison.trials]
    update = {"cells": cells, "trials": trials, "ratios": []}
    words = words_of(comparison.model_copy(update=update), tmp_path)
    assert "no time measured" in words and "lost unknown" in words


def test_scales_keep_their_order_and_put_never_last() -> None:
    for logarithmic in (True, False):
        scale = AxisScale([0.02, 3.0, 17.0, math.inf], logarithmic=logarithmic)
        places = [scale.at(value) for value in (0.02, 3.0, 17.0, math.inf)]
        assert (
            places == sorted(places)
            and places[-1] > places[-2]
            and places[0] >= 0
            and places[-1] < 100
        )
        assert len(scale.ticks()) >= 2
    assert AxisScale([], logarithmic=True).at(math.inf) > 90
    assert AxisScale([0.0], logarithmic=False).ticks()


def test_the_page_has_the_columns_of_a_run_in_the_same_words(written: Written) -> None:
    comparison, root = written
    text, _ = read(written)
    markdown = (root / "compare.md").read_text()
    for name in ("full rate", "redundant", "rank-hours"):
        assert name in text and name in markdown, name
    heads = re.findall(r"<th[^>]*>(?:<button>)?\s*([^<]+)", text)
    assert heads.count("full rate") == heads.count("redundant") >= 2, (
        "of the cells and of every trial"
    )
    fewer = {
        f"({m.counted})" for c in comparison.cells if (m := c.full_rate) is not None and m.n < c.n
    }
    assert bool(fewer) == (len(comparison.trials) > len(comparison.cells)), (
        "of seven trials one has none"
    )
    for said in fewer:
        assert said in text and said in markdown
