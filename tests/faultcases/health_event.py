"""How health-event is tried."""

from typing import Any

from tests.support.fault_fakes import FaultCase, event
from trainchaos.chaos.events.log import Event, Kind


def reported(**other: Any) -> Event:
    """The reader saw a report."""
    data = {
        "what": "xid",
        "code": 94,
        "device": "cpu:1",
        "node": None,
        "rank": 1,
        "source": "injected",
    }
    return event(Kind.HEALTH_REPORTED, "orchestrator", other.pop("at_ns", 20_700), **data | other)


CASE = FaultCase(
    variants=[{}, {"what": "thermal", "code": 95}, {"what": "nvlink", "code": 12}],
    evidence=[reported()],
    elsewhere=[
        [reported(code=79)],
        [reported(what="ecc")],
        [reported(rank=2)],
        [reported(node=1)],
        [reported(at_ns=20_000)],
    ],
)
