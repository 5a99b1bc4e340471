"""How data-stall is tried."""

from tests.support.fault_fakes import FaultCase, calm, event
from trainchaos.chaos.events.log import Event, Kind


def hung(process: str = "w1", cause: str = "hang") -> Event:
    """The supervisor gives a rank up."""
    return event(
        Kind.FAILURE_DETECTED,
        "orchestrator",
        22_500,
        failure=1,
        cause=cause,
        process=process,
        rank=1,
        detail="silent",
    )


CASE = FaultCase(
    required={"delay_s": 0.2},
    evidence=calm(data_s=0.25),
    elsewhere=[calm(data_s=0.05), [hung("w2")], [hung(cause="exit")]],
)
