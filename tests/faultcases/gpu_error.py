"""How gpu-error is tried."""

from tests.support.fault_fakes import FaultCase, exited, raised

CASE = FaultCase(
    evidence=[raised(kind="DeviceError"), exited(code=1)],
    elsewhere=[
        [raised(kind="DeviceError")],
        [exited(code=1)],
        [raised(kind="OSError"), exited(code=1)],
        [raised(kind="DeviceError", actor="w2"), exited(code=1)],
        [raised(kind="DeviceError"), exited(signum=9)],
    ],
)
