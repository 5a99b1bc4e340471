"""A scenario on top of another, and traces beside it: what is merged, and where errors point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.fake_catalogue import CATALOGUE
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.planning.planview import as_json, plan_run

BASE = """\
version: 1
name: base
seed: 17
workload: {kind: gpt, size: nano, ranks: 4, steps: 100, global_batch: 16, checkpoint: {every: 20}}
recovery: hot-spare
faults:
  - {id: kill, kind: process-kill, at: {step: 57}}
  - {id: two, kind: process-kill, at: {step: 70}}
sla:
  recovery_time: ["median < 2s"]
  goodput: ["median >= 0.5"]
"""
OWN = """\
extends: base.yaml
name: own
workload:
  steps: 60
faults:
  - {id: only, kind: process-kill, at: {step: 30}}
sla:
  goodput: null
"""


@pytest.fixture
def files(tmp_path: Path) -> Any:
    def write(**texts: str) -> Path:
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path / "own.yaml"

    return write


def read(path: Path, *overrides: str) -> LoadedScenario:
    return load(path, CATALOGUE, overrides=overrides)


def heads(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ScenarioError) as raised:
        read(path, *overrides)
    text = str(raised.value).replace(f"{path.parent}/", "")
    return [line for line in text.splitlines() if ": " in line and not line.startswith(" ")]


# --- extends


def test_mappings_merge_lists_are_replaced_null_takes_away(files: Any) -> None:
    loaded = read(files(base_yaml=BASE, own_yaml=OWN))
    scenario = loaded.cells[0].scenario
    assert (loaded.name, scenario.seed, scenario.extends) == ("own", 17, None)
    assert (
        scenario.workload.steps,
        scenario.workload.ranks,
        scenario.workload.checkpoint.every,
    ) == (
        60,
        4,
        20,
    )
    assert [fault.id for fault in scenario.faults] == ["only"]
    assert list(scenario.sla) == ["recovery_time"]
    assert loaded.sla_lines == {"recovery_time": [1]}  # this file has it from its first line


def test_errors_point_into_the_file_the_value_is_from(files: Any) -> None:
    base = BASE.replace("nano", "nanoo").replace("seed: 17", "seed: x")
    own = OWN.replace("steps: 60", "stepz: 60")
    assert heads(files(base_yaml=base, own_yaml=own)) == [
        "base.yaml:3:7: seed needs a whole number, not 'x'",
        "base.yaml:4:29: unknown size 'nanoo'; did you mean 'nano'?",
        "own.yaml:4:3: unknown key 'stepz'; did you mean 'steps'?",
    ]


def test_a_list_in_place_of_a_word_stands_where_it_is_written(files: Any) -> None:
    (error,) = heads(files(base_yaml=BASE, own_yaml=OWN + "recovery:\n  - hot-spare\n"))
    assert error.startswith("own.yaml:9:1: ")


def test_nothing_replaced_is_complained_of(files: Any) -> None:
    assert read(files(base_yaml=BASE.replace("step: 70", "stp: 70"), own_yaml=OWN))


def test_chains_and_overrides(files: Any) -> None:
    path = files(base_yaml=BASE, sub__middle_yaml="extends: ../base.yaml\nrepeat: 4\n", own_yaml="")
    path.write_text("extends: sub/middle.yaml\nseed: 3\n")
    scenario = read(path, "workload.steps=70").cells[0].scenario
    assert (scenario.repeat, scenario.seed, scenario.workload.steps, scenario.name) == (
        4,
        3,
        70,
        "base",
    )


@pytest.mark.parametrize(
    ("own", "error"),
    [
        ("extends: nowhere.yaml\n", "own.yaml:1:10: file nowhere.yaml does not exist"),
        ("extends: own.yaml\n", "own.yaml:1:10: extends goes in a circle: own.yaml -> own.yaml"),
        (
            "extends: [a]\n",
            "own.yaml:1:1: extends needs the name of a scenario file, relative to this one",
        ),
        (
            "extends: ${vars.x}\n",
            "own.yaml:1:10: extends needs the name of a scenario file, relative to this one",
        ),
        (
            "extends: null\n",
            "own.yaml:1:10: extends needs the name of a scenario file, relative to this one",
        ),
        ("extends: .\n", "own.yaml:1:10: file . does not exist"),
        (
            "extends: b.yaml\n",
            "b.yaml:1:10: extends goes in a circle: own.yaml -> b.yaml -> own.yaml",
        ),
        (
            "extends: c.yaml\n",
            "c.yaml:1:1: the file holds a list; a scenario is a mapping (key: value)",
        ),
    ],
)
def test_bad_extends(files: Any, own: str, error: str) -> None:
    first = heads(files(own_yaml=own, b_yaml="extends: own.yaml\n", c_yaml="[1]\n"))[0]
    assert first.replace(str(files().parent), ".") == error


def test_a_long_chain_ends(files: Any) -> None:
    path = files(own_yaml="extends: 0.yaml\n")
    for number in range(12):
        (path.parent / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    assert heads(path)[0] == "8.yaml:1:10: more than 10 files extend one another"


# --- traces

TRACED = BASE.replace("at: {step: 57}", "at: {trace: fleet.csv}")


def times(loaded: LoadedScenario) -> Any:
    return loaded.cells[0].scenario.faults[0].at.trace


def test_a_trace_of_times(files: Any) -> None:
    path = files(own_yaml=TRACED, fleet_csv="node,time\nn1,2.5\nn2,500ms\n\nn3, 7\n")
    trace = times(read(path))
    assert (trace.times, trace.steps, trace.file) == ([2.5, 0.5, 7.0], [], "fleet.csv")
    loaded = read(path)
    run = as_json(plan_run(loaded, CATALOGUE, seed=None, cells=loaded.cells))
    assert run["cells"][0]["repeats"][0]["faults"][0]["times_s"] == (0.5, 2.5, 7.0)


def test_the_resolved_run_needs_no_file(files: Any) -> None:
    loaded = read(files(own_yaml=TRACED, fleet_csv="time\n2\n"))
    dumped = loaded.cells[0].scenario.model_dump(mode="json")
    assert type(loaded.cells[0].scenario).model_validate(dumped) == loaded.cells[0].scenario


def test_a_trace_of_steps_and_json(files: Any) -> None:
    own = TRACED.replace("fleet.csv}", "fleet.json, phase: backward}")
    assert times(
        read(files(own_yaml=own, fleet_json='[{"step": 9}, {"step": 3, "node": "a"}]'))
    ).steps == [
        9,
        3,
    ]
    assert times(
        read(files(own_yaml=TRACED.replace("csv", "json"), fleet_json='[1, "2s"]'))
    ).times == [1, 2]


def test_a_trace_lies_beside_the_file_that_names_it(files: Any) -> None:
    path = files(
        sub__base_yaml=TRACED, sub__fleet_csv="step\n4\n", own_yaml="extends: sub/base.yaml\n"
    )
    assert times(read(path)).steps == [4]
    (path.parent / "mine.csv").write_text("step\n5\n")
    assert times(read(path, "faults.kill.at.trace=mine.csv")).steps == [5]


@pytest.mark.parametrize(
    ("name", "text", "errors"),
    [
        (
            "fleet_csv",
            "time\n1\nsoon\n-3\n",
            [
                "fleet.csv:3:1: a time is seconds, or a text such as 2.5s, not 'soon'",
                "fleet.csv:4:1: a time is seconds, or a text such as 2.5s, not '-3'",
            ],
        ),
        (
            "fleet_csv",
            "node,step\na,0\nb\n",
            [
                "fleet.csv:2:3: a step is a whole number from 1, not '0'",
                "fleet.csv:3:1: the row has no step",
            ],
        ),
        (
            "fleet_csv",
            "node\na\n",
            [
                "fleet.csv:1:1: the first line names the columns, exactly one of them time, time_s,"
                " step"
            ],
        ),
        ("fleet_csv", "time\n", ["fleet.csv:1:1: the trace has no rows"]),
        (
            "fleet_csv",
            "",
            [
                "fleet.csv:1:1: the first line names the columns, exactly one of them time, time_s,"
                " step"
            ],
        ),
        ("fleet_csv", 'time\n"1\n', ["fleet.csv:2:1: not valid CSV: unexpected end of data"]),
        ("fleet_json", "{", None),
        (
            "fleet_json",
            '{"a": 1}',
            [
                "fleet.json:1:1: a trace in JSON is a list of seconds, or of mappings with time or"
                " step"
            ],
        ),
        (
            "fleet_json",
            '[1,\n {"at": 3},\n {"step": 2.5}]',
            [
                "fleet.json:2:2: a row needs time or step, and not both",
                "fleet.json:3:11: a step is a whole number from 1, not 2.5",
            ],
        ),
        (
            "fleet_json",
            '[1, {"step": 2}]',
            ["fleet.json:1:1: a trace holds times or steps, not both"],
        ),
        (
            "fleet_json",
            "[[1], null, true]",
            [
                "fleet.json:1:2: a time is seconds, or a text such as 2.5s, not [1]",
                "fleet.json:1:7: a time is seconds, or a text such as 2.5s, not None",
                "fleet.json:1:13: a time is seconds, or a text such as 2.5s, not True",
            ],
        ),
        ("fleet_txt", "1\n", ["own.yaml:7:48: trace fleet.txt: a trace is a .csv or .json file"]),
    ],
)
def test_bad_traces(files: Any, name: str, text: str, errors: list[str] | None) -> None:
    own = TRACED.replace("fleet.csv", name.replace("_", "."))
    found = heads(files(own_yaml=own, **{name: text}))
    assert found == errors if errors else "not valid YAML" in found[0]


def test_a_phase_goes_with_a_trace_of_steps_only(files: Any) -> None:
    own = TRACED.replace("fleet.csv}", "fleet.csv, phase: backward}")
    assert "phase goes with" in heads(files(own_yaml=own, fleet_csv="time\n2\n"))[0]
