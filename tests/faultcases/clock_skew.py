"""How clock-skew is tried."""

from tests.support.fault_fakes import FaultCase, effect, event
from trainchaos.chaos.events.log import Event, Kind

STARTED = event(Kind.ACTOR_STARTED, "w1", 600, pid=1, host="h", wall_ns=5_000_000_000)


def read(wall_s: float, **more: int) -> Event:
    return effect(wall_ns=int(wall_s * 1e9) + 20_000, **more)


CASE = FaultCase(
    required={"offset_s": 3.0},
    variants=[{}, {"direction": "back"}, {"offset_s": 3600.0}],
    evidence=[STARTED, read(8.0)],  # type: ignore[list-item]
    elsewhere=[
        [read(8.0)],
        [STARTED, read(5.0)],
        [STARTED, read(2.0)],
        [STARTED, read(8.0, number=1)],
    ],  # type: ignore[list-item]
)
