"""Live spares of models that several ranks hold together, with real processes: a rank of each part
is killed in turn, its spare takes its place, and no state is copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.decided import decided
from trainchaos.chaos.events.log import Event, Kind, read_log

pytestmark = pytest.mark.real
SCENARIOS = Path(__file__).resolve().parents[3] / "scenarios" / "parallel"
TOLD = (
    Kind.SPARE_PLACED,
    Kind.SPARE_SYNCED,
    Kind.SPARE_DROPPED,
    Kind.PARKED,
    Kind.SURVIVORS_PARKED,
    Kind.STATE_READY,
)


def given(events: list[Event]) -> list[Event]:
    """The state of each member that is new in a later generation."""
    return [event for event in events if event.kind is Kind.STATE_READY and "bytes" in event.data]


@pytest.mark.parametrize(
    ("name", "parts", "kills"),
    [
        ("hsdp-live", 2, 2),
        ("tp-live", 2, 2),
        pytest.param("mesh-live", 4, 3, marks=pytest.mark.long),
    ],
)
def test_a_spare_of_each_part_takes_a_place_and_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: int, kills: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert decided(SCENARIOS / f"{name}.yaml", "runs") == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob(f"runs/{name}/latest/events/*faulted")
    events = list(read_log(arm).events)
    told = [
        (event.time_ns // 1000, event.kind.value, event.actor, event.step, event.data)
        for event in events
        if event.kind in TOLD
    ]
    places = {
        str(event.data["process"]): int(event.data["shard"])
        for event in events
        if event.kind is Kind.SPARE_PLACED
    }
    assert sorted([*places.values()][:parts]) == [*range(parts)], told
    copied = [event for event in events if event.kind is Kind.SPARE_SYNCED and event.data["bytes"]]
    least = min(event.data["bytes"] for event in copied)
    promoted = given(events)
    assert len(promoted) == kills, told
    for event in promoted:
        # the gradients of the last step may have been under way from the rank that was killed
        assert event.data["origin"] == "live" and event.data["bytes"] < least, told
        assert places[event.actor] == int(event.data["rank"]) % parts
