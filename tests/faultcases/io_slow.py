"""How io-slow is tried."""

from tests.support.fault_fakes import FaultCase, event
from trainchaos.chaos.events.log import Event, Kind


def saved(time_ns: int, seconds: float, actor: str = "w1") -> Event:
    """A save."""
    return event(
        Kind.CHECKPOINT_COMMITTED,
        actor,
        time_ns,
        checkpoint="step-00000020",
        bytes=1,
        seconds=seconds,
    )


def hung(process: str = "w1", phase: str = "checkpoint", time_ns: int = 22_500) -> Event:
    """The supervisor gives a rank up."""
    return event(
        Kind.FAILURE_DETECTED,
        "orchestrator",
        time_ns,
        failure=1,
        cause="hang",
        process=process,
        rank=1,
        detail=f"silent for 5.00 s in {phase} of step 12, limit 5.00 s",
    )


CASE = FaultCase(
    required={"delay_s": 0.1},
    evidence=[saved(10_000, 0.02), saved(21_000, 0.9)],
    elsewhere=[
        [saved(10_000, 0.02), saved(21_000, 0.2)],
        [saved(10_000, 0.9)],
        [saved(21_000, 0.9, "w2")],
        [hung("w2")],
        [hung(phase="data")],
        [hung(time_ns=10_000)],
    ],
)
