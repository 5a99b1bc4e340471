"""How store-latency is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    required={"latency_ms": 50.0},
    evidence=[effect(actor="orchestrator", round_trip_s=0.06)],
    elsewhere=[[effect(round_trip_s=0.02)], [effect(number=1, round_trip_s=0.06)]],
)
