"""Baseline files: what goes in comes out, and what cannot be compared is refused with what
to do.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.files import write_json
from trainchaos.harness.gating.baseline import (
    Baseline,
    BaselineCell,
    BaselineError,
    differences,
    load,
)
from trainchaos.harness.judge.measure.measure import summarise

TEST = {"workload": {"kind": "gpt", "steps": 100}, "faults": [{"id": "kill", "at": {"step": 57}}]}


def baseline(machine: dict[str, Any] | None = None, test: dict[str, Any] | None = None) -> Baseline:
    found = {"recovery_time": summarise("recovery_time", [0.5, math.inf, 0.25])}
    return Baseline(
        scenario="example",
        run_id="2026-11-20T18-02-11-17",
        started="2026-11-20T18:02:11+00:00",
        seed=17,
        verdict="pass",
        machine=machine or {"host": "a", "cores": 2},
        versions={"torch": "2.13.0"},
        cells={"default": BaselineCell(strategy="hot-spare", test=test or TEST, metrics=found)},
    )


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "new" / "baseline.json"
    write_json(path, baseline(), "")
    assert load(path) == baseline()
    values = json.loads(path.read_text())["cells"]["default"]["metrics"]["recovery_time"]["values"]
    assert values == [0.5, "Infinity", 0.25]
    assert [p.name for p in path.parent.iterdir()] == ["baseline.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a baseline"),
        ("[]", "not a baseline"),
        ('{"kind": "something else"}', "make one with: chaos baseline save RUN"),
        (
            '{"kind": "trainchaos baseline", "schema_version": 7}',
            "a newer version (7; this one reads up to 1): upgrade trainchaos",
        ),
        ('{"kind": "trainchaos baseline", "schema_version": 1}', "is damaged at scenario"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(BaselineError, match="baseline") as caught:
        load(path)
    assert words in str(caught.value) and caught.value.exit_code == 2


def test_no_file_and_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="No such file"):
        load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BaselineError, match="it is not text"):
        load(tmp_path / "binary")


def test_a_damaged_value_is_refused(tmp_path: Path) -> None:
    data = baseline().model_dump(mode="json")
    data["cells"]["default"]["metrics"]["recovery_time"]["values"] = ["fast"]
    path = tmp_path / "b.json"
    path.write_text(json.dumps(data))
    with pytest.raises(
        BaselineError, match=r"damaged at cells\.default\.metrics\.recovery_time\.values"
    ):
        load(path)


def test_another_host_of_the_same_kind_is_the_same_machine() -> None:
    assert differences(baseline(), baseline({"host": "b", "cores": 2})) == ([], [])


def test_another_machine_and_another_test_are_named() -> None:
    machine, played = differences(baseline(), baseline({"host": "a", "cores": 64}))
    assert (machine, played) == (["cores: 2 then, 64 now"], [])
    other = {
        "workload": {"kind": "gpt", "steps": 200},
        "faults": [{"id": "kill", "at": {"step": 58}}],
    }
    assert differences(baseline(), baseline(test=other))[1] == [
        "default: faults.0.at.step: 57 then, 58 now",
        "default: workload.steps: 100 then, 200 now",
    ]
