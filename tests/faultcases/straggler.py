"""How straggler is tried."""

from tests.support.fault_fakes import FaultCase, calm

CASE = FaultCase(
    required={"factor": 3.0},
    variants=[
        {"mode": mode} for mode in ("duty-cycle", "cpu-contention", "cgroup-quota", "sm-contention")
    ],
    evidence=calm(compute_s=0.03),
    elsewhere=[calm(compute_s=0.012), calm(compute_s=0.03)[:22]],
)
