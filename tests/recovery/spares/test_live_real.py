"""A live spare with real processes: two ranks are killed, the second the one that feeds the spare,
and no state is copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.decided import decided
from trainchaos.chaos.events.log import Kind, read_log

pytestmark = pytest.mark.real
TOLD = (Kind.SPARE_SYNCED, Kind.SPARE_DROPPED, Kind.PARKED, Kind.SURVIVORS_PARKED, Kind.STATE_READY)
SCENARIO = Path(__file__).resolve().parents[3] / "scenarios" / "process" / "hot-spare-live.yaml"


def test_a_promotion_copies_no_state_and_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert decided(SCENARIO, "runs") == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob("runs/hot-spare-live/latest/events/*faulted")
    events = read_log(arm).events
    given = {
        event.generation: (event.data["origin"], event.data["bytes"])
        for event in events
        if event.kind is Kind.STATE_READY and "bytes" in event.data
    }
    whole = max(event.data["bytes"] for event in events if event.kind is Kind.SPARE_SYNCED)
    parked = next(event for event in events if event.kind is Kind.SURVIVORS_PARKED)
    steps = {name: held["step"] for name, held in parked.data["processes"].items()}
    told = [
        (event.time_ns // 1000, event.kind.value, event.actor, event.step, event.data)
        for event in events
        if event.kind in TOLD and event.generation <= 2
    ]
    if steps["w3"] == max(steps.values()):
        assert given[2] == ("live", 0), told
    else:  # the rank that feeds the spare had not done the last step itself
        assert given[2][0] == "live" and 0 < given[2][1] < whole
    # the gradients of the last step may have been under way from the rank that was killed
    assert given[3][0] == "live" and given[3][1] < whole


def test_spares_rehearse_before_they_are_ready_and_ranks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = SCENARIO.with_name("hot-spare-rehearsed.yaml")
    assert decided(scenario, "runs") == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob("runs/hot-spare-rehearsed/latest/events/*faulted")
    log = read_log(arm).events
    made = {event.actor: event for event in log if event.kind is Kind.SPARE_REHEARSED}
    ready = {e.data["process"]: e for e in log if e.kind is Kind.PROCESS_READY}
    assert {*made} == {name for name in ready if name.startswith("s")} and len(made) >= 2
    for name, event in made.items():
        assert event.data["error"] == "" and event.time_ns < ready[name].time_ns
