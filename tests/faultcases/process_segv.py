"""How process-segv is tried."""

from tests.support.fault_fakes import FaultCase, exited

CASE = FaultCase(
    evidence=[exited(signum=11)],
    elsewhere=[[exited(process="w2", signum=11)], [exited(signum=9)], [exited(code=139)]],
)
