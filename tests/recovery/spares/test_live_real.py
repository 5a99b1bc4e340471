"""A live spare with real processes: two ranks are killed, the second the one that feeds the spare,
and no state is copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.spares.promoted import promotions
from tests.support.decided import decided
from trainchaos.chaos.events.log import Kind, read_log

pytestmark = pytest.mark.real
SCENARIO = Path(__file__).resolve().parents[3] / "scenarios" / "process" / "hot-spare-live.yaml"


def test_a_promotion_copies_no_state_and_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert decided(SCENARIO, "runs") == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob("runs/hot-spare-live/latest/events/*faulted")
    log = read_log(arm)
    whole = max(event.data["bytes"] for event in log.of(Kind.SPARE_SYNCED))
    first, second = promotions(log)
    if first.parked.data["processes"]["w3"]["step"] == first.newest:
        assert (first.origin, first.size) == ("live", 0)
    else:  # the rank that feeds the spare had not done the last step itself
        assert first.origin == "live" and 0 < first.size < whole
    # the gradients of the last step may have been under way from the rank that was killed
    expected = ("peer", False) if second.ahead else ("live", True)
    assert (second.origin, second.size < whole) == expected


ALONE = """\
version: 1
name: alone
seed: 1
workload: {kind: gpt, size: nano, ranks: 1, steps: 40, global_batch: 16, checkpoint: {every: 10}}
recovery: {strategy: hot-spare, sync: live}
faults: [{id: k, kind: process-kill, target: {rank: 0}, at: {step: 28, phase: backward}}]
stop_conditions: [{when: "no_committed_step_for > 60s"}]
"""


def test_a_lone_rank_is_lost_and_its_spare_has_the_newest_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone.yaml").write_text(ALONE)
    assert decided("alone.yaml", "runs") == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob("runs/alone/latest/events/*faulted")
    began = [e.data["state"] for e in read_log(arm).of(Kind.GENERATION_STARTED)]
    resumed = [e.data["resume_step"] for e in read_log(arm).of(Kind.GENERATION_READY)]
    assert began == ["initial", "spare"] and 23 <= resumed[1] <= 27, resumed


@pytest.mark.long
def test_spares_rehearse_before_they_are_ready_and_ranks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = SCENARIO.with_name("hot-spare-rehearsed.yaml")
    assert decided(scenario, "runs") == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob("runs/hot-spare-rehearsed/latest/events/*faulted")
    log = read_log(arm)
    made = {event.actor: event for event in log.of(Kind.SPARE_REHEARSED)}
    ready = {event.data["process"]: event for event in log.of(Kind.PROCESS_READY)}
    assert {*made} == {name for name in ready if name.startswith("s")} and len(made) >= 2
    for name, event in made.items():
        assert event.data["error"] == "" and event.time_ns < ready[name].time_ns
