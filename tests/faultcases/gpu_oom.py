"""How gpu-oom is tried."""

from tests.support.fault_fakes import FaultCase, exited, raised

CASE = FaultCase(
    evidence=[raised(kind="OutOfMemoryError"), exited(code=1)],
    elsewhere=[
        [raised(kind="OutOfMemoryError")],
        [exited(code=1)],
        [raised(kind="OSError"), exited(code=1)],
        [raised(kind="OutOfMemoryError", actor="w2"), exited(code=1)],
        [raised(kind="OutOfMemoryError"), exited(signum=9)],
    ],
    raises="out of memory",
)
