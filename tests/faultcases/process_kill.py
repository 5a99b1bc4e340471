"""How process-kill is tried."""

from tests.support.fault_fakes import FaultCase, exited

CASE = FaultCase(
    evidence=[exited(signum=9)],
    elsewhere=[
        [exited(process="w2", signum=9)],
        [exited(signum=11)],
        [exited(code=1)],
        [exited(signum=9, asked_ns=20_000)],
    ],
)
