"""How link-throttle is tried."""

from tests.support.fault_fakes import FaultCase, calm, effect


def probed(mbit_per_s: float | None) -> object:
    return effect(
        actor="orchestrator", link=[1, 0], by="a fake", round_trip_s=0.05, mbit_per_s=mbit_per_s
    )


CASE = FaultCase(
    variants=[{}, {"method": "links"}],
    required={"mbit_per_s": 20.0},
    evidence=[*calm(collective_s=0.4), probed(19.0)],  # type: ignore[list-item]
    elsewhere=[calm(collective_s=0.0012), calm(collective_s=0.4)[:22]],
)
