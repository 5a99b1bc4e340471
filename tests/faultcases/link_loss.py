"""How link-loss is tried."""

from tests.support.fault_fakes import FaultCase, calm, effect

PROBED = effect(actor="orchestrator", link=[1, 0], round_trip_s=0.05, mbit_per_s=100.0)

CASE = FaultCase(
    required={"percent": 2.0},
    evidence=[*calm(collective_s=0.25), PROBED],
    elsewhere=[calm(collective_s=0.25), [*calm(collective_s=0.1), PROBED]],
)
