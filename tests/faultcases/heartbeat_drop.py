"""How heartbeat-drop is tried."""

from tests.support.fault_fakes import FaultCase, calm, declared

HANG = declared("hang", process="w1", at_ns=30_500)

CASE = FaultCase(
    evidence=[*calm(), HANG],
    elsewhere=[
        [*calm()[:21], HANG],
        [*calm(), declared("hang", process="w2", at_ns=30_500)],
        [HANG],
    ],
)
