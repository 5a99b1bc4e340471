"""The coordinator under simulated agents: the statistics, the page, and a small load by Locust."""

from __future__ import annotations

import gc
import json
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane import cases, load, messages
from benchmarks.control_plane.agents import SimulatedJob
from benchmarks.control_plane.cases import Case, false_deaths, summary
from benchmarks.control_plane.coordinator import RECORD, records
from tests.support.fakes.orders import join
from trainchaos.chaos.errors import ChaosError, MissingCapability, ScenarioError
from trainchaos.chaos.events.log import Event, Kind


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 201)]
    assert summary([]) is None
    assert summary(values) == {"n": 200, "p50": 100, "p99": 198, "max": 200}
    assert summary([9.0, 2.0, 4.0]) == {"n": 3, "p50": 4.0, "p99": 9.0, "max": 9.0}


def event(kind: Kind, **data: Any) -> Event:
    return Event(
        seq=0, time_ns=0, actor="orchestrator", kind=kind, generation=0, step=None, data=data
    )


def test_a_death_is_false_unless_its_node_was_struck() -> None:
    events = [
        *(event(Kind.PROCESS_SPAWNED, process=f"w{n}", node=n, role="worker") for n in range(3)),
        event(Kind.NODE_LOST, node=1, why="killed"),
        event(Kind.FAILURE_DETECTED, process="w1", cause="exit", detail=""),
        event(Kind.FAILURE_DETECTED, process=None, cause="error", detail="nobody"),
    ]
    assert false_deaths(events, frozenset({1})) == {"nodes": [], "processes": []}
    events += [
        event(Kind.NODE_LOST, node=2, why="silent"),
        event(Kind.FAILURE_DETECTED, process="w0", cause="hang", detail="late"),
    ]
    found = false_deaths(events, frozenset({1}))
    assert found == {"nodes": ["node 2: silent"], "processes": ["w0: hang: late"]}


def test_a_record_that_is_written_in_part_is_read_later() -> None:
    data = RECORD.pack(1, 7, 2_500_000_000, 1500) + RECORD.pack(0, 8, 3_000_000_000, 20)[:-1]
    assert list(records(data)) == [("beat", 7, 2.5, 1.5)]


class Place:
    """Has a node."""

    def __init__(self, node: int) -> None:
        self.node = node


def test_a_simulated_job_trains_while_it_is_whole_and_its_ring_sees_a_loss() -> None:
    now_s = [10.0]
    job = SimulatedJob(step_s=2.0, clock_s=lambda: now_s[0])
    for rank in range(6):
        assert not job.trains
        job.join(Place(rank // 2), f"w{rank}", join(rank=rank, world=6))  # type: ignore[arg-type]
    now_s[0] += 5.0
    assert job.trains and job.committed == 2
    assert [name for _, name in job.lose({1})] == ["w1", "w4"], "the neighbours of ranks 2 and 3"
    now_s[0] += 5.0
    assert not job.trains and job.committed == 2


def result(**changed: Any) -> dict[str, Any]:
    beat = {"n": 2048, "p50": 3.0, "p99": 41.0, "max": 60.0}
    latency = {"heartbeat": beat, "failure to decision": {**beat, "n": 1, "max": 190.0}}
    made = load.failed("rack", 2048, 8, "")
    return made | {"latency_ms": latency} | changed


def test_what_messages_cost_is_measured_over_links_that_carry_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    messages.main(["--rounds", "2"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    told = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert told[:3] == [
        "leave: the coordinator orders",
        "leave: the agent answers",
        "leave: the coordinator hears",
    ]
    assert gc.isenabled(), "as before"
    assert len(told) == 9 and all(int(row.split(" | ")[1].removesuffix(" |")) > 0 for row in rows)


def test_a_page_says_which_goals_are_met_and_keeps_its_text(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n{cases.BEGIN}\nold\n{cases.END}\nafter\n")
    load.write(file, [result()], "a machine")
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert f"commit {load.commit_of()}; a machine." in text
    assert "41.0 ms, n=1 cases (goal under 50 ms: met)" in text
    assert "190.0 ms, n=1 cases (goal under 200 ms: met)" in text
    assert "| rack | 2,048 (16,384) | 3.0 / 41.0 / 60 (2,048) |" in text
    late = result(latency_ms={"heartbeat": {"n": 9, "p50": 1.0, "p99": 50.0, "max": 70.0}})
    assert "50.0 ms, n=2 cases (goal under 50 ms: missed)" in cases.goals([late, result()])
    failed = load.failed("tenth", 2048, 8, "no time was left")
    assert "not measured" in cases.goals([failed]) and "(no time was left)" in cases.rows([failed])
    file.write_text("no marks")
    with pytest.raises(ScenarioError, match="lacks the lines"):
        load.write(file, [result()], "")


def test_bad_input_is_said_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "case.json").write_text('{"name": "rack"}')
    with pytest.raises(ScenarioError, match="no case of the load test"):
        Case.read(tmp_path / "case.json")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1000))
    with pytest.raises(MissingCapability, match="the hard limit is 1000"):
        load.allow_files(2048)
    monkeypatch.setattr(load, "find_spec", lambda _: object())
    monkeypatch.setattr(load, "allow_files", lambda _: None)
    assert load.main(["--agents", "1", "--out", str(tmp_path)]) == ScenarioError.exit_code
    assert load.main(["--write", str(tmp_path / "none.md")]) == ScenarioError.exit_code
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    assert load.main([]) == MissingCapability.exit_code
    said = capsys.readouterr().err
    assert "1 agents of 8 ranks" in said and "lacks the lines" in said and "not installed" in said


def test_all_cases_are_kept_when_one_fails_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[tuple[str, int]] = []

    def run(given: Any, name: str, agents: int, *, most_s: float) -> dict[str, Any]:
        played.append((name, agents))
        if name == "tenth":
            raise ChaosError("it broke")
        if agents == 8192:
            raise KeyboardInterrupt
        made = result(case=name, agents=agents)
        folder = tmp_path / f"{name}-{agents}-now"
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(made))
        return made

    monkeypatch.setattr(load, "run", run)
    monkeypatch.setattr(load, "find_spec", lambda _: object())
    file = tmp_path / "page.md"
    file.write_text(f"{cases.BEGIN}\n{cases.END}\n")
    words = ["--all", "--out", str(tmp_path), "--write", str(file)]
    assert load.main(words) == 1
    assert len(played) == len(load.ALL) - 1 and "(it broke)" in file.read_text()
    assert file.read_text().count("| 2,048 (") == 7
    played.clear()
    assert load.main([*words, "--resume"]) == 1
    assert played == [("tenth", 2048), ("steady", 8192)], "the others are kept"


@pytest.mark.real
@pytest.mark.skipif(find_spec("locust") is None, reason="the extra 'load' is not installed")
def test_a_small_load_loses_a_rack_and_nobody_else(tmp_path: Path) -> None:
    words = ["--agents", "8", "--ranks", "2", "--rack", "2", "--case", "rack", "--steady", "2"]
    words += ["--hold", "1", "--limit", "60", "--most", "200", "--out", str(tmp_path)]
    assert load.main(words) == 0
    (folder,) = tmp_path.iterdir()
    made = json.loads((folder / "results.json").read_text())
    assert made["problem"] == "" and made["false_deaths"] == 0
    assert made["latency_ms"]["register"]["n"] == 8
    assert made["latency_ms"]["heartbeat"]["n"] >= 8
    assert made["latency_ms"]["failure to decision"]["n"] == 1
    assert made["facts"] == {"struck": 2, "generation": 2, "world": 12, "told": 6}
    assert "failure to decision" in (folder / "locust.html").read_text()
    named = {each["name"]: each for each in json.loads((folder / "locust.json").read_text())}
    assert named["register"]["num_requests"] == 8 and "heartbeat" in named
