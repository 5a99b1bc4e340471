"""How coordinator-kill is tried."""

from tests.support.fault_fakes import FaultCase, event
from trainchaos.chaos.events.log import Kind


def adopted(time_ns: int) -> object:
    return event(
        Kind.COORDINATOR_ADOPTED,
        "orchestrator",
        time_ns,
        down_s=1.0,
        events=20,
        members=["w0"],
        stage="training",
    )


CASE = FaultCase(evidence=[adopted(25_000)], elsewhere=[[adopted(20_000)]])  # type: ignore[list-item]
