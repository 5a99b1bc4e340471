"""How link-throttle is tried."""

from fault_fakes import FaultCase, calm

CASE = FaultCase(
    variants=[{}, {"method": "proxy"}],
    required={"mbit_per_s": 20.0},
    evidence=calm(collective_s=0.4),
    elsewhere=[calm(collective_s=0.0012), calm(collective_s=0.4)[:22]],
)
