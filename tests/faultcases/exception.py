"""How exception is tried."""

from tests.support.fault_fakes import FaultCase, exited, raised

CASE = FaultCase(
    evidence=[raised(), exited(code=1)],
    elsewhere=[
        [raised()],
        [exited(code=1)],
        [raised(actor="w2"), exited(code=1)],
        [raised(), exited(code=0)],
        [raised(kind="OSError"), exited(code=1)],
        [raised(), exited(signum=9)],
    ],
    raises="injected failure",
)
