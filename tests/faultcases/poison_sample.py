"""How poison-sample is tried."""

from tests.support.fault_fakes import FaultCase, event
from trainchaos.chaos.events.log import Event, Kind


def caught(time_ns: int) -> Event:
    """A step that the job refused."""
    return event(
        Kind.NONFINITE_CAUGHT, "w2", time_ns, step=21, rank=2, blamed=[1], what="loss or gradient"
    )


CASE = FaultCase(
    variants=[{}, {"sample": 5}],
    evidence=[caught(21_000)],
    elsewhere=[[caught(20_400)]],
    restores=True,
)
