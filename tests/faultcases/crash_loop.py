"""How crash-loop is tried."""

from tests.support.fault_fakes import FaultCase, exited, raised

CASE = FaultCase(
    evidence=[raised(kind="CrashLoopError"), exited(code=1)],
    elsewhere=[
        [raised(kind="CrashLoopError")],
        [exited(code=1)],
        [raised(kind="OSError"), exited(code=1)],
        [raised(kind="CrashLoopError"), exited(signum=9)],
    ],
    raises="injected crash",
)
