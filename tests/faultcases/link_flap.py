"""How link-flap is tried."""

from tests.support.fault_fakes import FaultCase, calm, effect

PROBED = effect(actor="orchestrator", link=[1, 0], round_trip_s=0.3, mbit_per_s=100.0)

CASE = FaultCase(
    required={"down_s": 0.4, "up_s": 0.4},
    evidence=[*calm(collective_s=0.35), PROBED],
    elsewhere=[calm(collective_s=0.35), [*calm(collective_s=0.1), PROBED]],
)
