"""Live spares of models that several ranks hold together, with real processes: a rank of each part
is killed in turn, its spare takes its place, and no state is copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.spares.promoted import promotions
from tests.support.decided import decided
from trainchaos.chaos.events.log import Kind, read_log

pytestmark = pytest.mark.real
SCENARIOS = Path(__file__).resolve().parents[3] / "scenarios" / "parallel"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "parts", "kills"),
    [
        ("hsdp-live", 2, 2),
        pytest.param("tp-live", 2, 2, marks=pytest.mark.long),
        pytest.param("mesh-live", 4, 3, marks=pytest.mark.long),
    ],
)
def test_a_spare_of_each_part_takes_a_place_and_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: int, kills: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert decided(SCENARIOS / f"{name}.yaml", "runs") == 0  # bit for bit, among the invariants
    (arm,) = tmp_path.glob(f"runs/{name}/latest/events/*faulted")
    log = read_log(arm)
    places = {e.data["process"]: e.data["shard"] for e in log.of(Kind.SPARE_PLACED)}
    assert sorted([*places.values()][:parts]) == [*range(parts)]
    least = min(e.data["bytes"] for e in log.of(Kind.SPARE_SYNCED) if e.data["bytes"])
    promoted = promotions(log)
    assert len(promoted) == kills
    for one in promoted:
        assert places[one.process] == one.rank % parts
        # the gradients of the last step may have been under way from the rank that was killed
        followed = one.origin == "live" and one.size < least
        assert followed or (one.ahead and one.origin == "peer"), one
