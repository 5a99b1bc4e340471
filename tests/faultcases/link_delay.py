"""How link-delay is tried."""

from tests.support.fault_fakes import FaultCase, calm, effect

PROBED = effect(actor="orchestrator", link=[1, 0], round_trip_s=0.05, mbit_per_s=100.0)

CASE = FaultCase(
    required={"delay_ms": 20.0},
    evidence=[*calm(collective_s=0.06), PROBED],
    elsewhere=[
        calm(collective_s=0.06),
        [*calm(collective_s=0.005), PROBED],
        [*calm(collective_s=0.06)[:22], PROBED],
        [*calm(collective_s=0.06), effect(number=1, round_trip_s=0.05, mbit_per_s=1.0)],
    ],
)
