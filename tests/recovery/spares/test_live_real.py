"""A live spare with real processes: two ranks are killed, the second the one that feeds the spare,
and no state is copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.log import Kind, read_log

pytestmark = pytest.mark.real
SCENARIO = Path(__file__).resolve().parents[3] / "scenarios" / "process" / "hot-spare-live.yaml"


def test_a_promotion_copies_no_state_and_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(["run", str(SCENARIO)]) == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob("runs/hot-spare-live/2*/events/*faulted")
    events = read_log(arm).events
    given = {
        event.generation: (event.data["origin"], event.data.get("bytes"))
        for event in events
        if event.kind is Kind.STATE_READY and "bytes" in event.data
    }
    # the gradients of the last step may have been under way from the rank that was killed
    whole = {event.data["bytes"] for event in events if event.kind is Kind.SPARE_SYNCED}
    assert given[2] == ("live", 0)
    assert given[3][0] == "live" and given[3][1] < max(whole)
