"""How partition is tried."""

from fault_fakes import FaultCase, calm, effect, gave_up

PROBED = effect(actor="orchestrator", link=[1, 0], round_trip_s=None, mbit_per_s=None)

CASE = FaultCase(
    evidence=[PROBED, gave_up(21_000)],
    elsewhere=[
        [gave_up(21_000)], [PROBED, gave_up(20_000)], [PROBED, gave_up(21_000, cause="exit")],
        [*calm(collective_s=0.1), PROBED],
    ],
)  # fmt: skip
