"""How process-term is tried."""

from fault_fakes import FaultCase, event, exited

from chaos.events import Event, Kind


def heard(process: str = "w1", cause: str = "notice") -> Event:
    """The notice, as the rank passed it on."""
    return event(
        Kind.FAILURE_DETECTED, "orchestrator", 20_600, failure=1, cause=cause, process=process, rank=1,
        detail="told by SIGTERM",
    )  # fmt: skip


CASE = FaultCase(
    variants=[{}, {"grace_s": 0.5}],
    evidence=[heard()],
    elsewhere=[[heard("w2")], [heard(cause="exit")], [exited(code=0)], [exited(signum=11)], [exited(code=1)]],
)
