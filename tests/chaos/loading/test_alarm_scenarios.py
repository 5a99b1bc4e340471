"""The scenarios of health alarms: each passes because its detector speaks, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from tests.chaos.loading.test_scenarios import FOLDER, loaded, simulate
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.overrides import of_option
from trainchaos.chaos.scenario.fault import Alarm as Name
from trainchaos.harness.judge.checkers import ALARMS
from trainchaos.harness.judge.results import Results
from trainchaos.recovery.health.detector import Alarm
from trainchaos.recovery.health.device_detectors import (
    EccDetector,
    IdleDetector,
    LinkDetector,
    ThermalDetector,
)
from trainchaos.recovery.health.job_detectors import (
    DigestDetector,
    HangDetector,
    SpikeDetector,
    StragglerDetector,
    ThroughputDetector,
)
from trainchaos.recovery.health.readings import Reading

DETECTORS = {
    "digest-mismatch": DigestDetector,
    "ecc-acceleration": EccDetector,
    "gradient-spike": SpikeDetector,
    "hang": HangDetector,
    "idle-device": IdleDetector,
    "loss-spike": SpikeDetector,
    "slow-link": LinkDetector,
    "straggler": StragglerDetector,
    "thermal-limit": ThermalDetector,
    "throughput-drop": ThroughputDetector,
}
SHORT = ("digest-mismatch", "gradient-spike", "hang")
"""In ``make test``; the others are in ``make test-all``."""
PLAYED = [
    pytest.param(name, id=name, marks=() if name in SHORT else pytest.mark.long)
    for name in DETECTORS
]


def played(name: str, memory: Path, baseline: str = "none", path: Path | None = None) -> Results:
    """The scenario of an alarm, or of another file, simulated, without its control arm."""
    overrides = [
        of_option("--launcher", "launcher", "sim"),
        of_option("--set", "baseline", baseline),
    ]
    return simulate(loaded(path or FOLDER / "health" / f"alarm-{name}.yaml", overrides), memory)


def test_every_alarm_has_a_scenario() -> None:
    there = {path.stem.removeprefix("alarm-") for path in (FOLDER / "health").glob("alarm-*.yaml")}
    # one detector raises two alarms; memory errors that were not corrected warn (warned-rank)
    assert there == set(DETECTORS) == set(get_args(Name)) - {"ecc-uncorrected"}
    for name in there:
        (cell,) = loaded(FOLDER / "health" / f"alarm-{name}.yaml").cells
        assert [fault.expect.alarm for fault in cell.scenario.faults] == [name]
        assert all(fault.expect.alarm_within for fault in cell.scenario.faults)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLAYED)
def test_a_scenario_fails_with_its_detector_blind(
    name: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(self: object, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        return ()

    monkeypatch.setattr(DETECTORS[name], "look", blind)
    results = played(name, memory)
    assert results.exit_code == 1
    assert {n for n, f in results.cells[0].invariants.items() if f.verdict == "fail"} == {ALARMS}
    assert "should have raised" in results.cells[0].invariants[ALARMS].witness


@pytest.mark.parametrize(
    ("workload", "expect", "said"),
    [
        ("{kind: mlp, ranks: 4, steps: 40}", "{alarm: slow}", "slow"),
        ("{kind: mlp, ranks: 4, steps: 40}", "{alarm_within: 20}", "say expect.alarm too"),
        ("{kind: mlp, ranks: 4, steps: 40}", "{alarm: hang, alarm_within: 0}", "alarm_within"),
        ("{command: [sleep, '1'], ranks: 2}", "{alarm: hang}", "which a command does not"),
    ],
)
def test_an_alarm_that_there_cannot_be_is_an_error_with_its_line(
    tmp_path: Path, workload: str, expect: str, said: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"version: 1\nname: x\nworkload: {workload}\nrecovery: hot-spare\n"
        "faults:\n  - id: a\n    kind: process-stop\n    target: {rank: 1}\n"
        f"    at: {{step: 9}}\n    duration: 2s\n    expect: {expect}\n"
    )
    with pytest.raises(ScenarioError) as error:
        loaded(path)
    assert f"{path}:11" in str(error.value) and said in str(error.value)


@pytest.mark.slow
def test_an_alarm_that_comes_too_late_fails_it(memory: Path, tmp_path: Path) -> None:
    text = (FOLDER / "health" / "alarm-digest-mismatch.yaml").read_text()
    assert text.count("alarm_within: 100") == 1
    path = tmp_path / "late.yaml"
    path.write_text(text.replace("alarm_within: 100", "alarm_within: 3"))
    results = played("", memory, path=path)
    found = results.cells[0].invariants[ALARMS]
    assert results.exit_code == 1 and found.verdict == "fail"
    assert "steps after the fault, 3 are allowed" in found.witness
