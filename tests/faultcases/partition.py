"""How partition is tried."""

from tests.support.fault_fakes import FaultCase, calm, declared, effect

PROBED = effect(actor="orchestrator", link=[1, 0], round_trip_s=None, mbit_per_s=None)

CASE = FaultCase(
    evidence=[PROBED, declared("error", at_ns=21_000)],
    elsewhere=[
        [declared("error", at_ns=21_000)],
        [PROBED, declared("error", at_ns=20_000)],
        [PROBED, declared("exit", at_ns=21_000)],
        [*calm(collective_s=0.1), PROBED],
    ],
)
