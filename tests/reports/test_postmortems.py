"""The post-mortem of each incident: on the page, in the summary, and what it claims to be
cheaper.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages.html_page import Page
from trainchaos.chaos import cli
from trainchaos.chaos.events.log import Kind, Log, make_log, read_log
from trainchaos.harness.explain.account import Cheaper, cheaper_than, cost_of, told_of
from trainchaos.harness.explain.strip import strip
from trainchaos.harness.explain.text import facts_of
from trainchaos.harness.host.rundir import RunDirectory, open_run
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports import html, markdown
from trainchaos.reports.content import postmortems

SCENARIO = """\
version: 1
name: told
seed: 5
workload: {kind: mlp, ranks: 4, steps: 40, global_batch: 16, checkpoint: {every: 10, keep: 3}}
recovery: ${matrix.recovery}
matrix: {recovery: [hot-spare, checkpoint-restart]}
repeat: 3
launcher: sim
baseline: none
faults:
  - {id: stuck, kind: rank-hang, target: {rank: 2}, at: {step: 16, phase: backward},
      params: {hold_s: 60}}
  - {id: kill, kind: process-kill, target: {rank: 1}, at: {step: 28}}
  - {id: late, kind: process-kill, target: {rank: 0}, at: {step: 900}}
"""
Told = tuple[RunDirectory, Results]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A simulated run of two strategies, with a hang and a kill in each arm."""
    place = tmp_path_factory.mktemp("told")
    (place / "told.yaml").write_text(SCENARIO)
    cli.invoke(["run", str(place / "told.yaml"), "--runs", str(place / "runs"), "--quiet"])
    run = open_run(place / "runs" / "told" / "latest")
    (run.root / "report.html").rename(run.root / "first.html")
    return run, Results.model_validate_json(run.results.read_text(encoding="utf-8"))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are drawn with the plots of one cell: they have nothing to do with incidents."""
    monkeypatch.setattr(html, "MAX_PLOTTED_CELLS", 1)


def section_of(run: RunDirectory, results: Results) -> tuple[str, str]:
    """The page's section as HTML, and as text."""
    return section_in(html.render(run, results))


def section_in(path: Path) -> tuple[str, str]:
    page = path.read_text(encoding="utf-8")
    assert Page(page).open == []
    found = re.search(r'<section id="incidents">.*?</section>', page, flags=re.DOTALL)
    section = found.group() if found else ""
    return section, " ".join(" ".join(Page(section).text).split())


@pytest.mark.slow
def test_the_page_tells_each_incident(told: Told) -> None:
    section, text = section_in(told[0].root / "first.html")
    assert section.count("<details") == 12, "two in each of six arms, and none that never fired"
    assert section.count('<details class="arm" open') == 0, "all of them ended well"
    assert text.count("that is who was hit") == 12
    assert text.count("blamed rightly") == 12
    for name in ("hit", "first signal", "blamed", "cost", "recommended action"):
        assert section.count(f"<dt>{name}</dt>") == 12, name
    assert text.count("restart: restart what failed") == 12
    assert text.count("step committed") == 12
    assert "median of 3; each of them cost less than this one" in text
    assert section.count("would have cost less</dt>") == 6, "of checkpoint-restart alone"


def test_timelines_go_from_the_hit_to_the_first_new_step(told: Told) -> None:
    run, results = told
    found, more = postmortems.postmortems(run, results)
    assert more == 0
    for one in found:
        what = [moment[1] for moment in one.moments]
        times = [float(moment[0].removesuffix(" s")) for moment in one.moments]
        assert times == sorted(times)
        assert times[0] == 0
        assert what[0] == one.incident.kind
        assert [w.split(":")[0].split(" (")[0] for w in what[-5:]] == [
            "failure detected",
            "decision",
            "generation started",
            "generation ready",
            "step committed",
        ]
        recovery = one.incident.recovery_time
        assert recovery is not None
        assert times[-1] == pytest.approx(recovery, abs=0.01)
        signal = one.account.signal
        assert signal is not None
        kill = one.incident.fault == "kill"
        assert signal.what.startswith("process exited" if kill else "failure detected")


def test_the_log_alone_names_the_same_rank(told: Told) -> None:
    run, results = told
    for one in postmortems.postmortems(run, results)[0]:
        said = one.account.diagnosis
        assert said is not None
        assert said.rank == one.incident.target["rank"]
        assert said.cause.value == ("process-death" if one.incident.fault == "kill" else "hang")


@pytest.mark.slow
@pytest.mark.usefixtures("plain")
def test_those_that_did_not_end_well_come_first(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, results = told
    worst = len(results.faults) - 2
    assert results.faults[worst].fired
    faults = [
        f.model_copy(update={"outcome": "hang", "recovery_time": math.inf}) if n == worst else f
        for n, f in enumerate(results.faults)
    ]
    changed = results.model_copy(update={"faults": faults})
    monkeypatch.setattr(postmortems, "MAX_INCIDENTS", 2)
    found, more = postmortems.postmortems(run, changed)
    assert [one.incident.outcome for one in found] == ["recovered", "hang"]
    assert more == 10
    section, text = section_of(run, changed)
    assert section.count('<details class="arm" open') == 1
    assert "10 more incidents are not told here" in text
    assert "never recovered" in text
    rows, left = postmortems.lines(changed)
    assert ([row[3] for row in rows], left) == (["recovered", "hang"], 10)


def test_a_log_that_cannot_be_read_costs_its_own_incidents_only(told: Told, tmp_path: Path) -> None:
    run, results = told
    gone = results.arms[0].id
    kept, more = postmortems.postmortems(RunDirectory(_without(run, gone, tmp_path)), results)
    assert gone not in {one.account.arm for one in kept}
    assert (len(kept), more) == (10, 2)


def _without(run: RunDirectory, arm: str, place: Path) -> Path:
    (place / "events").mkdir()
    for one in (run.root / "events").iterdir():
        if one.name != arm:
            (place / "events" / one.name).symlink_to(one)
    return place


@pytest.mark.slow
@pytest.mark.usefixtures("plain")
def test_a_run_without_incidents_has_no_section(told: Told) -> None:
    run, results = told
    empty = results.model_copy(update={"faults": []})
    assert section_of(run, empty)[0] == ""
    assert "### Incidents" not in markdown.render(run, empty).read_text()


def test_the_summary_has_a_line_for_each(told: Told) -> None:
    run, results = told
    text = markdown.render(run, results).read_text()
    lines = text[text.index("### Incidents") :].split("\n###")[0].splitlines()
    rows = [line for line in lines if "(rank-hang)" in line or "(process-kill)" in line]
    assert len(rows) == 12
    assert all("rank 2, by hang" in row for row in rows if "rank-hang" in row)
    assert all("rank-s" in row for row in rows)


def test_who_is_blamed_wrongly_is_said_in_the_line(told: Told) -> None:
    _, results = told
    faults = [f.model_copy(update={"blamed_rank": 3}) for f in results.faults]
    rows, _ = postmortems.lines(results.model_copy(update={"faults": faults}))
    assert rows[0][4] == "rank 3, by hang, but rank 2 was hit"


def costing(results: Results, costs: Mapping[str, list[float]], **changes: Any) -> Results:
    """The kills alone, with these recovery times by cell."""
    faults = [
        f.model_copy(update={"recovery_time": costs[f.cell].pop(0), **changes})
        for f in results.faults
        if f.fault == "kill" and costs[f.cell]
    ]
    return results.model_copy(update={"faults": faults})


def with_stacks(log: Log, *said: Mapping[str, Any], kind: Kind = Kind.STACKS_DUMPED) -> Log:
    """The log with stacks, or another kind, that were dumped just after its first failure."""
    failure = next(log.of(Kind.FAILURE_DETECTED))
    more = [
        replace(failure, kind=kind, time_ns=failure.time_ns + n + 1, data=data)
        for n, data in enumerate(said)
    ]
    actors = [
        replace(actor, events=tuple(sorted((*actor.events, *more), key=lambda e: e.time_ns)))
        if name == failure.actor
        else actor
        for name, actor in log.actors.items()
    ]
    return make_log(actors)


FRAMES = ["/a/b/train.py:7 in step", "/a/b/loop.py:9 in main", "x.py:1 in a", "y.py:2 in b", "z"]
HUNG = {"process": "w2", "role": "hung", "answered": True, "frames": FRAMES, "file": "w2.stacks"}
SILENT = {"process": "w0", "role": "peer", "answered": False, "frames": [], "file": ""}


def incidents_with(told: Told, *said: Mapping[str, Any], kind: Kind = Kind.STACKS_DUMPED) -> Any:
    """The hang and the kill of the first arm, with what was dumped."""
    run, results = told
    arm = results.arms[0].id
    return told_of(with_stacks(read_log(run.events(arm)), *said, kind=kind), arm, results)


def labelled(incident: Any, wanted: str) -> list[str]:
    return [text for label, text in facts_of(incident) if label == wanted]


def test_where_a_hung_rank_stood_is_told(told: Told) -> None:
    hang, kill = incidents_with(told, HUNG, SILENT)
    assert labelled(hang, "stack") == [
        "w2 (hung) in b/train.py:7 in step < b/loop.py:9 in main < x.py:1 in a < y.py:2 in b;"
        " w2.stacks",
        "w0 (peer) did not answer: it was stopped, or waited in the kernel",
    ]
    assert labelled(kill, "stack") == []
    assert [event.data["frames"] for event in hang.stacks] == [FRAMES, []]


@pytest.mark.parametrize("frames", [None, "text", 7, [None, {"a": 1}]])
def test_stacks_of_any_shape_are_told(told: Told, frames: Any) -> None:
    hang, _ = incidents_with(told, {**HUNG, "frames": frames})
    assert labelled(hang, "stack")


ENTRY = {"group": "generation-1", "seq": 41, "op": "all_reduce", "sizes": "8 Float"}
BEHIND = {
    "process": "w2",
    "role": "hung",
    "rank": 2,
    "entries": [{**ENTRY, "seq": 40, "state": "done"}],
    "why": "",
}
WAITS = {
    **BEHIND,
    "process": "w0",
    "role": "peer",
    "rank": 0,
    "entries": [{**ENTRY, "state": "started"}],
}


def test_which_collective_each_rank_stood_in_is_told(told: Told) -> None:
    hang, kill = incidents_with(told, BEHIND, WAITS, kind=Kind.COLLECTIVES_DUMPED)
    (line,) = labelled(hang, "waits")
    assert line.startswith("rank 2 (w2) has not begun all_reduce 41 (8 Float) of generation-1")
    assert labelled(kill, "waits") == []
    assert [record.rank for record in hang.records] == [2, 0]


@pytest.mark.slow
def test_the_summary_says_it_too(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    run, results = told
    text = markdown.render(run, results).read_text(encoding="utf-8")
    assert "Collectives" not in text, "simulated ranks have no records"

    def read(run: RunDirectory, arm: ArmResult) -> Log:
        log = read_log(run.events(arm.id))
        return with_stacks(log, BEHIND, WAITS, kind=Kind.COLLECTIVES_DUMPED)

    monkeypatch.setattr(postmortems, "log_of", read)
    text = markdown.render(run, results).read_text(encoding="utf-8")
    rows = text[text.index("### Collectives in which ranks stood") :].splitlines()
    rows = [row for row in rows if row.startswith("| stuck")]
    assert len(rows) == 6 and all("has not begun all" in row for row in rows)


def test_a_paper_has_no_stacks(told: Told) -> None:
    run, results = told
    log = with_stacks(read_log(run.events(results.arms[0].id)), HUNG)
    assert list(log.of(Kind.STACKS_DUMPED))
    assert not list(strip(log).of(Kind.STACKS_DUMPED)), "the frames name the injection"


SPARE, RESTART = "recovery=hot-spare", "recovery=checkpoint-restart"


def test_cheaper_is_only_what_always_was(told: Told) -> None:
    _, results = told

    def told_for(spare: list[float], restart: list[float], **changes: Any) -> Cheaper | None:
        made = costing(results, {SPARE: spare, RESTART: restart}, **changes)
        return cheaper_than(made, next(f for f in made.faults if f.cell == RESTART))

    found = told_for([0.1, 0.3, 0.2], [1.0])
    assert found is not None
    assert (found.label, found.n) == ("hot-spare", 3)
    assert found.rank_s == pytest.approx(0.2 * 5), "four ranks and a spare"
    assert told_for([0.1, 0.3, 9.0], [1.0]) is None, "one of them cost more"
    assert told_for([0.1, 0.2], [1.0]) is None, "two are too few"
    assert told_for([0.1, 0.3, 0.2], [1.0], landed=False) is None
    assert told_for([0.1, 0.3, 0.2], [1.0], answered_with="stuck") is None
    assert told_for([1.0, 1.3, 1.2], [1.0]) is None, "the restart was the cheaper one"
    assert told_for([0.1, 0.3, 0.2], [math.inf]) is not None, "never recovered costs more"


def test_cells_that_differ_in_more_are_not_compared(told: Told) -> None:
    _, results = told
    cells = [
        c.model_copy(update={"params": {**c.params, "ranks": n}})
        for n, c in enumerate(results.cells)
    ]
    made = costing(results, {SPARE: [0.1] * 3, RESTART: [1.0]})
    restarted = next(f for f in made.faults if f.cell == RESTART)
    assert cheaper_than(made, restarted) is not None
    assert cheaper_than(made.model_copy(update={"cells": cells}), restarted) is None


def test_costs_are_those_of_the_metric(told: Told) -> None:
    _, results = told
    for cell in results.cells:
        costs = [cost_of(results, f) for f in results.faults if f.cell == cell.id and f.fired]
        known = sorted(cost / 3600 for cost in costs if cost is not None)
        assert known == pytest.approx(sorted(cell.metrics["failure_cost"].values))
