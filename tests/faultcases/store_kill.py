"""How store-kill is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    evidence=[effect(actor="orchestrator", reaped_signal=9, next_port=2)],
    elsewhere=[
        [effect(number=1, reaped_signal=9)],
        [effect(reaped_signal=11)],
        [effect(round_trip_s=0.1)],
    ],
)
