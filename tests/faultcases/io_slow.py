"""How io-slow is tried."""

from chaos.events.log import Event, Kind
from tests.support.fault_fakes import FaultCase, event


def saved(time_ns: int, seconds: float, actor: str = "w1") -> Event:
    """A save."""
    return event(
        Kind.CHECKPOINT_COMMITTED, actor, time_ns, checkpoint="step-00000020", bytes=1, seconds=seconds
    )


CASE = FaultCase(
    required={"delay_s": 0.1},
    evidence=[saved(10_000, 0.02), saved(21_000, 0.9)],
    elsewhere=[[saved(10_000, 0.02), saved(21_000, 0.2)], [saved(10_000, 0.9)], [saved(21_000, 0.9, "w2")]],
)
