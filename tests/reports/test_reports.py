"""Every report is read back with an independent reader, and survives hostile names and missing
logs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pandas
import pytest

from tests.reports.conftest import Drawn
from tests.support.pages.html_page import Page, drawings, fetches_nothing, regular_tables
from tests.support.pages.sample_results import HOSTILE, build, empty, metric
from trainchaos import reports
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from trainchaos.chaos.units import number
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Finding, Results
from trainchaos.reports import markdown, trace
from trainchaos.reports.content.figures import range_of
from trainchaos.reports.content.series import ArmSeries
from trainchaos.reports.content.tables import align
from trainchaos.reports.outlets.terminal import summary

Finished = tuple[RunDirectory, Results]


@pytest.fixture
def finished(drawn: Drawn) -> Finished:
    """A run of three strategies, all reports rendered."""
    return drawn.run, drawn.results


def test_steps_of_one_moment_have_a_rate_together() -> None:
    steps = pandas.DataFrame({"time_s": [1.0, 2.0, 2.0, 4.0], "step": [1, 2, 3, 4], "samples": 4})
    arm: Any = None
    series = ArmSeries(arm=arm, observed=False, steps=steps, healed={})
    assert series.throughput() == [(2.0, 8.0), (4.0, 2.0)]


def page_of(run: RunDirectory) -> tuple[str, Page]:
    text = (run.root / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


@pytest.mark.slow
def test_package_finds_its_reports_and_stays_light() -> None:
    assert reports.names() == ["html", "junit", "markdown", "openmetrics", "trace"]
    heavy = "{'pandas', 'matplotlib', 'jinja2', 'torch'}"
    code = f"import sys, trainchaos.reports.outlets.terminal; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_html_is_one_balanced_file_that_fetches_nothing(drawn: Drawn) -> None:
    text, page = drawn.text, drawn.page
    fetches_nothing(text, page)
    assert page.tags["script"] == 0
    links = [a for a in page.addresses if not a.startswith(("#", "data:,"))]
    assert {"results.json", "trace.json"} & set(links) == {"trace.json"}, "only what exists"
    assert all((drawn.run.root / unquote(link)).is_file() for link in links)


def test_html_holds_what_the_run_showed(drawn: Drawn) -> None:
    results = drawn.results
    text = " ".join(" ".join(drawn.page.text).split())
    assert (
        text.index("FAIL") < text.index("Strategies side by side") < text.index("Recovery by phase")
    )
    for wanted in (
        "never",
        "kill-one-rank.yaml:14",
        "signal 9",
        results.reproduce,
        "no arm ran 20 steps",
        "wall clock",
    ):
        assert wanted in text
    assert HOSTILE.replace("\x1b", "\\x1b") in text, "an escape sequence is spelt out"
    assert "same loss at every one of 120 steps, bit for bit" in text
    assert "differs from step 78 on" in text


def test_svgs_are_well_formed_labelled_and_themed(drawn: Drawn) -> None:
    shown = drawings(drawn.text)
    assert len(drawings(drawn.text, "timeline")) == 3 * 3
    assert len(drawings(drawn.text, "plot")) == 2 * 3
    for one in shown:
        title = next((e for e in one.iter() if e.tag.endswith("title")), None)
        named = one.get("role") == "img" and title is not None and title.text
        assert named or one.get("aria-hidden") == "true"


@pytest.mark.long
def test_html_is_the_same_every_time(drawn: Drawn) -> None:
    again = reports.render("html", drawn.run, drawn.results)
    assert again.read_text(encoding="utf-8") == drawn.text


def test_wall_clock_table_adds_up(finished: Finished) -> None:
    from trainchaos.reports.page.plots import wall_seconds

    _, results = finished
    for (cell, kind), spent in wall_seconds(results).items():
        walls = [a.wall_s for a in results.arms if (a.cell, a.arm) == (cell, kind)]
        assert sum(spent.values()) == pytest.approx(sum(walls) / len(walls))


def test_fault_that_never_fired_is_an_error_not_a_pass(finished: Finished, tmp_path: Path) -> None:
    _, results = finished
    never = results.faults[0].model_copy(
        update={
            "occurrence": -1,
            "landed": False,
            "healed": False,
            "outcome": "not-landed",
            "step": None,
            "phases": [],
        }
    )
    path = reports.render(
        "junit", RunDirectory(tmp_path), results.model_copy(update={"faults": [never]})
    )
    error = next(
        e
        for e in ET.parse(path).getroot().iter("error")
        if "never fired" in (e.get("message") or "")
    )
    assert "process-kill" in (error.get("message") or "")


def test_markdown_tables_are_regular_and_inert(finished: Finished) -> None:
    run, results = finished
    text = (run.root / "summary.md").read_text()
    assert text.startswith("## ✗ FAIL")
    assert results.reproduce in text
    regular_tables(text)


def test_markdown_stays_below_the_limit_of_a_step_summary(
    finished: Finished, tmp_path: Path
) -> None:
    _, results = finished
    long = results.skipped[0].model_copy(update={"reason": "x" * 20_000})
    path = markdown.render(
        RunDirectory(tmp_path), results.model_copy(update={"skipped": [long] * 300})
    )
    assert path.stat().st_size < 900 * 1024
    assert "Cut here" in path.read_text()


@pytest.mark.slow
def test_trace_follows_the_rules_of_perfetto(finished: Finished) -> None:
    run, results = finished
    events = json.loads(
        (run.root / "trace.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} in JSON")
    )
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["ts"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(b[0] >= a[1] - 1e-6 for a, b in pairwise(spans))
    named = {(e["pid"], e["tid"]) for e in events["traceEvents"] if e["name"] == "thread_name"}
    assert tracks.keys() <= named
    asynchronous = [e for e in events["traceEvents"] if e["ph"] in "be"]
    opened = {e["id"]: e["ts"] for e in asynchronous if e["ph"] == "b"}
    closed = {e["id"]: e["ts"] for e in asynchronous if e["ph"] == "e"}
    assert opened.keys() == closed.keys() and len(opened) == len(results.faults)
    assert all(closed[key] >= start for key, start in opened.items())
    names = {e["name"] for e in events["traceEvents"] if e["ph"] == "X"}
    assert {"detect", "regroup", "backward", "step 77", "generation 1"} <= names


def test_trace_shows_what_ranks_did_besides_training() -> None:
    def event(number: int, kind: Kind, actor: str, **data: Any) -> Event:
        return Event(
            kind=kind,
            actor=actor,
            seq=number,
            time_ns=number * 1000,
            generation=1,
            step=None,
            data=data,
        )

    said = [
        (Kind.BUSY, "w0", {"what": "evaluation", "limit_s": 60}),
        (Kind.BUSY, "w0", {"what": "upload", "limit_s": 60}),
        (Kind.BUSY_ENDED, "w0", {"what": "upload", "seconds": 1e-6}),
        (Kind.BUSY_ENDED, "w0", {"what": "evaluation", "seconds": 3e-6}),
        (Kind.BUSY, "w1", {"what": "lost in it", "limit_s": 60}),
        (Kind.PROCESS_EXITED, ORCHESTRATOR, {"process": "w1"}),
        (Kind.BUSY, ORCHESTRATOR, {"rank": 3, "what": "to the end", "limit_s": math.inf}),
        (Kind.RUN_FINISHED, ORCHESTRATOR, {}),
    ]
    log = Log(actors={}, events=tuple(event(n, *one[:2], **one[2]) for n, one in enumerate(said)))
    found = [(actor, span.name, span.start, span.end) for actor, span in trace._busy(log, 0)]
    assert found == [
        ("w0", "upload", 1, 2),
        ("w0", "evaluation", 0, 3),
        ("w1", "lost in it", 4, 5),
        ("rank 3", "to the end", 6, 7),
    ]


def test_trace_clips_what_overlaps() -> None:
    spans = [
        trace.TraceSpan(name=n, start=a, end=b)
        for n, a, b in (("a", 0, 5), ("b", 3, 9), ("c", 4, 8), ("d", -2, 1))
    ]
    assert [(s.name, s.start, s.end) for s in trace.clip(spans)] == [
        ("d", 0, 1),
        ("a", 1, 5),
        ("b", 5, 9),
    ]


def test_summary_says_what_failed_where_and_what_to_do(finished: Finished) -> None:
    run, results = finished
    text = summary(results, run)
    lines = text.splitlines()
    assert lines[0].startswith("verdict FAIL (exit 1)   11 of 13 SLAs")
    failing = next(i for i, line in enumerate(lines) if "kill-one-rank.yaml:14" in line)
    assert "observed never, n=3" in lines[failing]
    assert "where it went (s): detect 0.0046" in lines[failing + 1]
    assert "inconclusive: no arm ran 20 steps" in text
    assert results.reproduce in text and "report.html" in text and "chaos analyze" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("title", ["first error", "last lines"])
def test_summary_quotes_a_command_once(finished: Finished, title: str) -> None:
    run, results = finished
    said = f"it ended before any progress was seen; its {title}:\n    | cannot find data"
    cell = results.cells[0].model_copy(
        update={"invariants": {"progress": Finding(verdict="inconclusive", witness=said)}}
    )
    changed = {
        "cells": [cell],
        "slas": [],
        "verdict": "inconclusive",
        "exit_code": 3,
        "reason": f"r0: {said}",
    }
    text = summary(results.model_copy(update=changed), run)
    assert text.count(f"its {title}:") == 1
    assert text.count("cannot find data") == 1 and text.count("before any progress was seen") == 2


def test_summary_of_an_interrupted_run_does_not_list_what_was_not_reached(
    finished: Finished,
) -> None:
    run, results = finished
    stopped = results.model_copy(update={"verdict": "interrupted", "exit_code": 130})
    text = summary(stopped, run)
    assert "inconclusive:" not in text and "hot-spare" in text and "report.html" in text
    cut = [arm.model_copy(update={"outcome": "interrupted"}) for arm in results.arms]
    lines = summary(stopped.model_copy(update={"arms": cut, "slas": []}), run).splitlines()
    assert lines[0].startswith("verdict INTERRUPTED (exit 130)")
    assert [line.split()[0] for line in lines[-4:]] == ["report", "again", "judge", "seal"]
    assert all("failed: " in line or "skipped: " in line for line in lines[1:-4])


def test_summary_prefers_the_latest_link(finished: Finished) -> None:
    run, results = finished
    link = run.root.parent / "latest"
    link.symlink_to(run.root.name)
    assert "/latest/report.html" in summary(results, run)
    link.unlink()
    assert "/run/report.html" in summary(results, run)


@pytest.mark.parametrize("verdict", ["interrupted", "skipped", "broken", "unsafe", "halted"])
def test_run_that_tested_nothing_still_reports_and_never_passes(
    tmp_path: Path, verdict: str
) -> None:
    run = RunDirectory(tmp_path)
    results = empty().model_copy(update={"verdict": verdict})
    paths = reports.render_all(run, results)
    assert all(path.stat().st_size > 0 for path in paths)
    suite = ET.parse(tmp_path / "junit.xml").getroot()[0]
    assert int(suite.get("skipped" if verdict == "skipped" else "errors", "0")) == 1
    assert page_of(run)[1].open == []
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    assert verdict.upper() in summary(results, run)


@pytest.mark.long
def test_missing_and_torn_logs_cost_only_their_plots(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run")
    for arm in results.arms:
        directory = run.events(arm.id)
        if "hot-spare" in arm.id:
            for file in directory.iterdir():
                file.unlink()
        elif "drop-replica" in arm.id:
            for file in directory.iterdir():
                file.write_bytes(file.read_bytes()[:-7])
    reports.render_all(run, results)
    text, page = page_of(run)
    assert page.open == []
    section = text.split('<section id="throughput">')[1].split("</section>")[0]
    assert len(drawings(section, "plot")) == 2
    assert "no series: hot-spare" in " ".join(" ".join(page.text).split())


@pytest.mark.slow
def test_report_without_any_log_keeps_its_tables(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run", logs=False)
    reports.render_all(run, results)
    _, page = page_of(run)
    assert "Recovery by phase" in " ".join(page.text)
    assert page.tags["table"] == 12, "of clauses and of invariants, one for each verdict"


@pytest.mark.parametrize(
    ("value", "better", "text"),
    [
        (0.61234, "neither", "0.612"),
        (0.61234, "lower", "0.613"),
        (0.9996, "higher", "0.999"),
        (0.9996, "lower", "1.00"),
        (0.1 + 0.2, "lower", "0.300"),
        (math.inf, "lower", "never"),
        (None, "lower", "–"),
        (math.nan, "lower", "–"),
        (1234.5, "neither", "1230"),
        (99.96, "neither", "100"),
        (0, "lower", "0"),
        (12.345, "neither", "12.3"),
        (0.000123456, "neither", "0.000123"),
        (-0.5, "neither", "-0.500"),
        (1.5e12, "neither", "1.50e+12"),
    ],
)
def test_numbers_have_three_digits_and_never_flatter(
    value: float | None, better: str, text: str
) -> None:
    assert number(value, better) == text


def test_numbers_stop_at_the_finest_digit() -> None:
    assert number(0.00346, finest=1e-4) == "0.0035"
    assert number(0.00001, finest=1e-4) == "<0.0001"
    assert number(3.14159, finest=1e-4) == "3.14"


def test_alignment_gives_all_numbers_one_width() -> None:
    padded = align(["0.61", "12", "never", "3.456"])
    assert padded == ["0.61\u2007", "12\u2008\u2007\u2007\u2007", "never", "3.456"]


def test_ranges_show_infinity_as_never() -> None:
    assert range_of(metric("s", [0.5, math.inf, 1.0])) == "[0.500, never]"
    assert range_of(metric("s", [0.5])) == ""
