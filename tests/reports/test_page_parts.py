"""Parts of the page: timelines, files, outputs, groups of findings, hints, earlier runs."""

from __future__ import annotations

import math
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.reports.conftest import Drawn
from tests.support.pages.html_page import Page, drawings
from tests.support.pages.sample_results import HOSTILE, build
from trainchaos import reports
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind, Log
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Finding, Results
from trainchaos.reports.content import artifacts, history, timeline
from trainchaos.reports.page import plots, tables

RUN = "2026-11-20T18-02-11-17"
MOST_BYTES = 4 << 20
"""Of the page of a big run."""
RESOLVED = """cells:
- exact_for: null
  id: recovery=hot-spare
  scenario:
    baseline: paired
    faults:
    - at: {STEP}
      id: kill
    launcher:
      kind: local
    recovery:
      strategy: hot-spare
    repeat: 3
    seed: 17
    workload:
      steps: 120
run_id: x
seed: 17
"""


def page_of(run: RunDirectory, results: Results) -> tuple[str, Page]:
    text = reports.render("html", run, results).read_text(encoding="utf-8")
    return text, Page(text)


def event(
    number: int,
    kind: Kind,
    generation: int = 1,
    step: int | None = None,
    data: dict[str, Any] | None = None,
) -> Event:
    return Event(
        kind=kind,
        actor=ORCHESTRATOR,
        seq=number,
        time_ns=number * 1_000_000_000,
        generation=generation,
        step=step,
        data=data or {},
    )


# --- timelines


def test_a_timeline_tells_a_failure_in_order() -> None:
    said = [
        (Kind.RUN_STARTED, 0, None, {}),
        (Kind.GENERATION_READY, 1, 0, {"members": ["w0"], "resume_step": 0, "checkpoint": None}),
        (Kind.STEP_COMMITTED, 1, 1, {"rank": 0}),
        (Kind.STEP_COMMITTED, 1, 2, {"rank": 0}),
        (Kind.CHECKPOINT_COMMITTED, 1, 1, {"checkpoint": "step-1"}),
        (
            Kind.FAULT_INJECTED,
            1,
            3,
            {"fault": "k", "kind": "process-kill", "target": {"process": "w1", "rank": 1}},
        ),
        (Kind.FAILURE_DETECTED, 1, 3, {"rank": 1, "cause": "exit", "detail": "signal 9"}),
        (Kind.DECISION, 1, None, {"reason": "warm restart", "actions": ["kill all"]}),
        (Kind.STATE_READY, 2, 1, {"origin": "checkpoint"}),
        (
            Kind.GENERATION_READY,
            2,
            1,
            {"members": ["w2"], "resume_step": 1, "checkpoint": "step-1"},
        ),
        (Kind.STEP_COMMITTED, 2, 2, {"rank": 0}),
        (Kind.STEP_COMMITTED, 2, 3, {"rank": 0}),
        (Kind.DECISION, 2, None, {"nothing": "of what is needed"}),
        (Kind.RUN_FINISHED, 2, None, {"outcome": "completed", "reason": "done"}),
    ]
    events = [event(n, kind, gen, step, data) for n, (kind, gen, step, data) in enumerate(said)]
    moments = timeline.moments_of(Log(actors={}, events=tuple(events)))
    assert [(m.time_s, m.what) for m in moments] == [
        (1.0, "generation 1 formed"),
        (4.0, "checkpoint committed"),
        (5.0, "fault injected: process-kill"),
        (6.0, "failure detected"),
        (7.0, "decision"),
        (8.0, "state restored"),
        (9.0, "generation 2 formed"),
        (10.0, "first step again"),
        (11.0, "first new step"),
        (13.0, "arm ended: completed"),
    ]
    assert (moments[2].who, moments[3].who) == ("rank 1 (w1)", "rank 1")
    assert moments[7].detail == "step 2, done before"


def test_a_long_timeline_leaves_out_checkpoints_first_and_says_so() -> None:
    one = timeline.Moment(time_s=1.0, lane=timeline.RECOVERY, what="decision")
    saved = timeline.Moment(time_s=1.0, lane=timeline.CHECKPOINT, what="checkpoint committed")
    assert timeline.bounded([one, saved] * 40) == [one] * 40
    assert len(timeline.bounded([one] * 5000)) == timeline.MAX_MOMENTS


def test_timelines_of_failed_arms_are_open_and_all_lanes_have_a_form(drawn: Drawn) -> None:
    text, results = drawn.text, drawn.results
    assert drawn.page.open == []
    arms = re.findall(r'<details class="arm"( open)?><summary>(.*?)</summary>', text, re.DOTALL)
    by_name = {re.search(r"<b>(.*?)</b>", said)[1]: bool(o) for o, said in arms}  # type: ignore[index]
    ended = {a.id: timeline.ended_well(a) for a in results.arms if a.arm == "faulted"}
    assert {name: not well for name, well in ended.items()} == by_name and len(by_name) == 9
    for root in drawings(text, "timeline"):
        lanes = {timeline.FAULT, timeline.RECOVERY, timeline.CHECKPOINT, timeline.OTHER}
        marks = [e for e in root.iter() if e.get("class") in lanes]
        assert marks and all(e[0].tag == "title" and e[0].text for e in marks)


# --- findings


def test_passes_are_behind_a_count_and_failures_open(drawn: Drawn) -> None:
    text, page = drawn.text, drawn.page
    for name, failed, passed in (("slas", 1, "11 of 13"), ("invariants", 1, "12 of 14")):
        section = text.split(f'<section id="{name}">')[1].split("</section>")[0]
        assert f'<div class="group fail"><h3>{failed} failed</h3>' in section
        assert "inconclusive</h3>" in section
        behind = section.split('<details class="group pass"><summary>')[1]
        assert passed in behind.split("</summary>")[0]
        assert "✗ fail" in section.split('<details class="group pass">')[0]
        assert "✗ fail" not in behind.split("</details>\n{")[0].split("<details>")[0]
    assert page.tags["script"] == 0
    assert [i for i in page.ids if i.startswith("only-")] == [
        "only-all",
        "only-fail",
        "only-inconclusive",
        "only-pass",
    ]
    css = (Path(reports.__file__).parent / "templates" / "report.css").read_text()
    for verdict in ("fail", "inconclusive", "pass"):
        assert f"#only-{verdict}:checked ~ section .group:not(.{verdict})" in css
        assert f"#only-{verdict}:checked ~ section .lived:not(.{verdict})" in css
    assert "#only-pass:checked ~ section details.group.pass::details-content" in css


@pytest.mark.slow
def test_timelines_are_filtered_with_the_findings(big: Drawn) -> None:
    text = big.text
    section = text.split('<section id="timeline">')[1].split("</section>")[0]
    lived = re.findall(r'<div class="lived (\w+)"><details class="arm"( open)?>', section)
    assert ("pass", "") in lived and {verdict for verdict, _ in lived} > {"pass"}
    assert all(opened for verdict, opened in lived if verdict != "pass")
    passed = re.search(r'<label for="only-pass">passed: (\d+)</label>', text)
    assert passed is not None
    assert int(passed[1]) >= sum(verdict == "pass" for verdict, _ in lived) > 0
    for verdict in {"fail", "inconclusive", "pass"} - {verdict for verdict, _ in lived}:
        assert f'<p class="note none {verdict}">None of these.</p>' in section


# --- hints


def test_points_and_heads_say_what_they_are(drawn: Drawn) -> None:
    text = drawn.text
    assert re.search(r"<title>recovery_time [\d.]+ s; recovery=hot-spare, repeat 2</title>", text)
    assert re.search(r"<title>recovery time [\d.]+ s; faulted arm of recovery=", text)
    assert re.search(r"<title>detect [\d.]+ s; faulted arm of recovery=hot-spare", text)
    mark = r'<rect class="mark"[^>]*><title>process-kill '
    assert re.search(mark + r"at [\d.]+ s; ", text) and re.search(mark + "in step 77; ", text)
    for name, words in (
        ("throughput", r"[\d.e-]+ to [\d.e-]+ s: [\d.]+ samples/s; [\d.]+ without the fault"),
        ("loss", r"step \d+: loss [\d.]+; [\d.]+ without the fault, difference -?[\d.e-]+"),
    ):
        section = text.split(f'<section id="{name}">')[1].split("</section>")[0]
        said = re.findall(r'<rect class="band"[^>]*><title>([^<]*)</title>', section)
        assert any(re.fullmatch(words, band) for band in said), said[:4]


def test_the_bands_of_a_plot_cover_it_once_and_are_few(drawn: Drawn) -> None:
    section = drawn.text.split('<section id="throughput">')[1].split("</section>")[0]
    for plot in re.findall(r"<svg.*?</svg>", section, re.DOTALL):
        rects = re.findall(r'<rect class="band" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', plot)
        edges = [(float(left), float(left) + float(wide)) for left, wide in rects]
        assert 5 < len(edges) <= plots.MAX_BANDS
        assert all(abs(a[1] - b[0]) < 0.3 for a, b in pairwise(edges))
        box = re.search(r'viewBox="0 0 ([0-9.]+)', plot)
        assert box is not None and edges[-1][1] <= float(box[1])


def test_heads_of_tables_say_what_they_are(drawn: Drawn) -> None:
    text = drawn.text
    assert re.search(r'<abbr title="recovery_time: [^"]+\[s\]">recovery</abbr>', text)
    assert re.search(r'<abbr title="steps_lost: [^"]+">steps_lost</abbr>', text)


# --- files and outputs


def put_log(run: RunDirectory, arm: str, name: str, data: bytes) -> None:
    run.logs(arm).mkdir(parents=True, exist_ok=True)
    (run.logs(arm) / name).write_bytes(data)


@pytest.fixture(scope="module")
def littered(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """A run with outputs, odd ones among them, beside secrets to which links lead."""
    place = tmp_path_factory.mktemp("littered")
    run, results = build(place / "run", logs=False)
    first, other = results.arms[0].id, results.arms[1].id
    put_log(run, first, "w0.log", b"hello\n")
    put_log(run, first, "w1.log", b"")
    put_log(run, first, "javascript:alert(1)&'\".log", b"x")
    (place / "secret").write_text("secret")
    (run.logs(first) / "w3.log").symlink_to(place / "secret")
    (run.root / "junit.xml").symlink_to(place / "secret")
    run.logs(other).parent.mkdir(exist_ok=True)
    shutil.rmtree(run.logs(other), ignore_errors=True)
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "w0.log").write_text("secret")
    run.logs(other).symlink_to(place / "elsewhere")
    failed, fine = failed_and_fine(results)
    lines = [f"line {n}" for n in range(500)] + ["x" * 900, HOSTILE, "tail\x00end"]
    put_log(run, failed, "w0.log", "\n".join(lines).encode() + b"\xff\n")
    os.mkfifo(run.logs(failed) / "w1.log")
    (run.logs(failed) / "w2.log").symlink_to(place / "secret")
    put_log(run, failed, "w3.log", b"seen\n")
    put_log(run, fine, "w0.log", b"nothing of interest\n")
    reports.render("trace", run, results)
    return Drawn(run, results, [reports.render("html", run, results)])


def failed_and_fine(results: Results) -> tuple[str, str]:
    """An arm that did not end well, and the last one that did."""
    failed = next(a for a in results.arms if a.outcome != "completed")
    return failed.id, next(a for a in reversed(results.arms) if a.outcome == "completed").id


def test_the_page_links_to_what_is_there(littered: Drawn) -> None:
    links = [a for a in littered.page.addresses if not a.startswith(("#", "data:,"))]
    arms = littered.results.arms[0].id, *failed_and_fine(littered.results)
    first, failed, fine = (littered.run.logs(arm).name for arm in arms)
    of_failed = [f"logs/{failed}/w0.log", f"logs/{failed}/w3.log"]
    assert sorted(map(unquote, links)) == sorted(
        [
            "trace.json",
            f"logs/{first}/w0.log",
            f"logs/{first}/javascript:alert(1)&'\".log",
            *of_failed,
            *of_failed,  # beside their last lines
            f"logs/{fine}/w0.log",
        ]
    )
    assert not [one for one in links if ":" in one]


def test_the_page_links_to_every_other_report_of_the_run(drawn: Drawn) -> None:
    assert {p.name for p in drawn.paths} - {"report.html"} <= set(drawn.page.addresses)


def test_output_of_a_failed_arm_is_lines_of_text(littered: Drawn) -> None:
    text, page, (failed, _) = littered.text, littered.page, failed_and_fine(littered.results)
    section = text.split('<section id="output">')[1].split("</section>")[0]
    *shown, last = re.findall(r"<li><code>(.*?)</code></li>", section)
    assert last == "seen"
    assert 0 < len(shown) <= artifacts.TAIL_LINES
    assert max(map(len, shown)) < 4 * artifacts.LINE_CHARACTERS
    assert shown[-1] == "tail\\x00end\ufffd" and "&lt;script&gt;" in shown[-2]
    assert "nothing of interest" not in text and page.tags["script"] == 0 and page.open == []
    assert f"of {os.path.getsize(littered.run.logs(failed) / 'w0.log')} bytes" in section


def test_a_pipe_or_a_link_for_an_output_is_not_read(littered: Drawn) -> None:
    assert "secret" not in littered.text and "<code>seen</code>" in littered.text


# --- earlier runs


def store(base: Path, name: str, results: Results, resolved: str = RESOLVED, **other: Any) -> Path:
    """A run directory with its results."""
    root = base / name
    root.mkdir()
    (root / "scenario.resolved.yaml").write_text(resolved)
    changed = results.model_copy(update={"run_id": name, **other})
    (root / "results.json").write_text(changed.model_dump_json())
    return root


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "kill-one-rank"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return build(tmp_path_factory.mktemp("sample") / "run", logs=False)[1]


def found(base: Path, results: Results, name: str = RUN) -> list[str]:
    past = history.history(RunDirectory(base / name), results.model_copy(update={"run_id": name}))
    assert past.runs[-1].present and past.runs[-1].run_id == name
    return [run.run_id for run in past.runs[:-1]]


def test_history_is_of_the_same_test_and_before_this_run(base: Path, sample: Results) -> None:
    store(base, RUN, sample)
    same = store(base, "2026-11-19T10-00-00-18", sample).name
    seed = RESOLVED.replace("seed: 17", "seed: 99").replace("repeat: 3", "repeat: 1")
    other_seed = store(base, "2026-11-18T10-00-00-99", sample, seed).name
    for number, (old, new) in enumerate(
        [
            ("steps: 120", "steps: 60"),
            ("strategy: hot-spare", "strategy: none"),
            ("id: kill", "id: other"),
            ("kind: local", "kind: docker"),
        ]
    ):
        store(base, f"2026-11-17T10-00-0{number}-1", sample, RESOLVED.replace(old, new))
    store(base, "2026-11-16T10-00-00-1", sample, simulated=True)
    store(base, "2026-11-15T10-00-00-1", sample, scenario="another")
    store(base, "2026-11-25T10-00-00-1", sample)  # later than this run
    assert found(base, sample) == [other_seed, same]
    simulated = sample.model_copy(update={"simulated": True})
    assert found(base, simulated) == ["2026-11-16T10-00-00-1"]


def test_history_ignores_what_is_damaged_hostile_or_behind_a_link(
    base: Path, sample: Results, tmp_path: Path
) -> None:
    store(base, RUN, sample)
    good = store(base, "2026-11-19T10-00-00-1", sample)
    damaged = {
        "2026-11-18T10-00-00-1": b"{",
        "2026-11-18T10-00-00-2": b"[" * 100_000,
        "2026-11-18T10-00-00-3": b"\xff\xfe",
        "2026-11-18T10-00-00-4": b" " * (history.MAX_RESULTS_BYTES + 1),
        "2026-11-18T10-00-00-5": b'{"scenario": "kill-one-rank", "simulated": NaN}',
        "2026-11-18T10-00-00-12": b'{"schema_version": 9, "what": "a newer version wrote it"}',
    }
    for name, data in damaged.items():
        (store(base, name, sample) / "results.json").write_bytes(data)
    pipe = store(base, "2026-11-18T10-00-00-6", sample) / "results.json"
    pipe.unlink()
    os.mkfifo(pipe)
    outside = store(tmp_path, "2026-11-18T10-00-00-7", sample)
    (base / outside.name).symlink_to(outside)
    linked = store(base, "2026-11-18T10-00-00-8", sample) / "results.json"
    linked.unlink()
    linked.symlink_to(good / "results.json")
    big = store(base, "2026-11-18T10-00-00-9", sample) / "scenario.resolved.yaml"
    big.write_text(RESOLVED + "# " + "x" * history.MAX_RESOLVED_BYTES)
    copied = store(base, "2026-11-18T10-00-00-10", sample)  # says that it is another run
    shutil.copy(good / "results.json", copied / "results.json")
    (base / "latest").symlink_to(good)
    (base / "2026-11-18T10-00-00-11").write_text("a file")
    assert found(base, sample) == [good.name]


def test_history_is_bounded(base: Path, sample: Results) -> None:
    store(base, RUN, sample)
    for number in range(60):
        store(base, f"2026-10-01T10-00-{number:02}-1", sample)
    seen = found(base, sample)
    assert len(seen) == history.MAX_RUNS - 1 and seen[-1] == "2026-10-01T10-00-59-1"
    past = history.history(RunDirectory(base / RUN), sample.model_copy(update={"run_id": RUN}))
    assert past.beyond
    assert "older ones were not read" in " ".join(tables.earlier_runs(past, sample).notes)


@pytest.mark.slow
def test_the_page_shows_earlier_runs_and_marks_its_own(base: Path, sample: Results) -> None:
    store(base, RUN, sample)
    text, page = page_of(RunDirectory(base / RUN), sample)
    assert "None lies beside this run" in text
    first = store(base, "2026-11-19T10-00-00-1", sample, started=HOSTILE, system={"host": HOSTILE})
    (first / "report.html").write_text("a page")
    metrics = sample.cells[2].metrics
    never = metrics["recovery_time"].model_copy(update={"median": math.inf})
    cell = sample.cells[2].model_copy(update={"metrics": metrics | {"recovery_time": never}})
    store(base, "2026-11-19T11-00-00-1", sample, cells=[*sample.cells[:2], cell])
    text, page = page_of(RunDirectory(base / RUN), sample)
    again, _ = page_of(RunDirectory(base / RUN), sample)
    assert text == again
    section = text.split('<section id="history">')[1].split("</section>")[0]
    assert section.count("<tr ") == 1 + 3 and section.count("this run, ") == 1
    assert page.tags["script"] == 0 and page.open == []
    assert "../2026-11-19T10-00-00-1/report.html" in page.addresses
    assert "../2026-11-19T11-00-00-1/report.html" not in page.addresses, "it is not there"
    plot = drawings(section, "past")[0]
    titles = [e.text or "" for e in plot.iter() if e.tag == "title"]
    assert len(titles) == 1 + 3 and "median never" in titles[2]


# --- bounds


def big_run(root: Path) -> tuple[RunDirectory, Results]:
    """A hundred faulted arms with thousands of events and long outputs each."""
    run, results = build(root, logs=False)
    one = next(a for a in results.arms if a.arm == "faulted" and a.cell == "recovery=hot-spare")
    fault = next(f for f in results.faults if f.cell == one.cell)
    arms = [
        one.model_copy(
            update={
                "id": f"{one.cell}.r{n}.faulted",
                "repeat": n,
                "outcome": "gave-up" if n == 99 else "completed",
                "invariants": {
                    name: Finding(verdict="pass", witness="w" * 300) for name in one.invariants
                },
            }
        )
        for n in range(100)
    ]
    for arm in arms:
        run.make_arm(arm.id)
        writer = EventWriter(run.events(arm.id), ORCHESTRATOR, iter(range(10**9)).__next__)
        writer.write(Kind.ACTOR_STARTED, pid=1, host="h", wall_ns=0)
        for n in range(200):
            writer.write(Kind.DECISION, reason=f"{HOSTILE} {n}" + "r" * 500, actions=[])
        writer.close()
        lines = 50 if arm.outcome == "completed" else 5000  # of the former nothing is shown
        for n in range(12):
            put_log(run, arm.id, f"w{n}.log", f"{HOSTILE}\n".encode() * lines)
    faults = [fault.model_copy(update={"repeat": n}) for n in range(100)]
    return run, results.model_copy(update={"arms": arms, "faults": faults})


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Its page."""
    run, results = big_run(tmp_path_factory.mktemp("big") / "run")
    return Drawn(run, results, [reports.render("html", run, results)])


@pytest.mark.slow
def test_the_page_of_a_big_run_is_bounded_and_says_what_is_left_out(big: Drawn) -> None:
    text, page, results = big.text, big.page, big.results
    assert len(text.encode()) < MOST_BYTES and page.open == []
    assert page.tags["script"] == 0
    arms = re.findall(r'<details class="arm"( open)?><summary>.*?<b>(\S+)</b>', text)
    shown = [name for _, name in arms]
    assert len(shown) == timeline.MAX_ARMS + 1 and shown.count(results.arms[99].id) == 2
    assert f"{100 - timeline.MAX_ARMS} more faulted arms are not shown here" in text
    assert f"{200 - timeline.MAX_MOMENTS} events left out here" in text
    assert "4 more files of this arm are not shown" in text
    linked = len([one for one in page.addresses if one.startswith("logs/")])
    assert linked <= artifacts.MAX_LINKS + 3 * artifacts.MAX_FILES
    assert re.search(r"The output of \d+ more arms is in the run's logs folder", text)
    assert "60 more arms are in results.json" in text
