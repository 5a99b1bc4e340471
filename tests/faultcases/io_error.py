"""How io-error is tried."""

from tests.support.fault_fakes import FaultCase, event
from trainchaos.chaos.events.log import Event, Kind


def failed(
    actor: str = "w1", time_ns: int = 20_600, error: str = "OSError: [Errno 5] Input/output error"
) -> Event:
    """A save that failed."""
    return event(Kind.CHECKPOINT_FAILED, actor, time_ns, checkpoint="step-00000020", error=error)


CASE = FaultCase(
    variants=[{}, {"error": "ESTALE"}, {"operations": ["rename"], "probability": 0.5}],
    evidence=[failed()],
    elsewhere=[
        [failed("w2")],
        [failed(time_ns=20_400)],
        [failed(error="OSError: [Errno 28] No space left")],
    ],
)
