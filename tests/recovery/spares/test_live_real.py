"""A live spare with real processes: two ranks are killed, the second the one that feeds the spare,
and no state is copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.decided import decided
from trainchaos.chaos.events.log import Event, Kind, Log, read_log

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
    first, second = log.of(Kind.SURVIVORS_PARKED)
    # A rank that is killed may have applied a step whose sum others had not read to its end: one
    # more than some of them, or than all of them.
    ahead = _last_step(log, "w3") > _newest(second)
    copied = _brought(log, first)
    if first.data["processes"]["w3"]["step"] == _newest(first):
        assert copied == ("live", 0)
    else:  # the rank that feeds the spare had not done the last step itself
        assert copied[0] == "live" and 0 < copied[1] < whole
    # the gradients of the last step may have been under way from the rank that was killed
    origin, size = _brought(log, second)
    assert (origin, size < whole) == (("peer", False) if ahead else ("live", True))


def _newest(parked: Event) -> int:
    """The last step that a survivor has applied."""
    return int(max(held["step"] for held in parked.data["processes"].values()))


def _last_step(log: Log, process: str) -> int:
    """The last step that a process has applied."""
    steps = [event.step for event in log.of(Kind.STEP_COMMITTED) if event.actor == process]
    return steps[-1] or 0


def _brought(log: Log, parked: Event) -> tuple[str, int]:
    """From where the spare got its state that took a place after these survivors had parked, and
    how many bytes.
    """
    ready = [e for e in log.of(Kind.STATE_READY) if e.generation == parked.generation + 1]
    (joined,) = [e for e in ready if e.actor not in parked.data["processes"]]
    return joined.data["origin"], joined.data["bytes"]


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
