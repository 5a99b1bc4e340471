"""How node-slow is tried."""

from tests.support.fault_fakes import FaultCase, calm, effect

WAITED = effect(actor="orchestrator", throttled=7)

CASE = FaultCase(
    required={"cores": 0.3},
    evidence=[*calm(compute_s=0.03), WAITED],
    elsewhere=[
        calm(compute_s=0.03),
        [*calm(compute_s=0.011), WAITED],
        [*calm(compute_s=0.03)[:23], WAITED],
        [*calm(compute_s=0.03), effect(number=1, throttled=7)],
    ],
)
