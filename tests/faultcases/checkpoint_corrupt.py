"""How checkpoint-corrupt is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    variants=[{"mode": mode} for mode in ("bitflip", "truncate", "missing", "stale", "swap-shard")]
    + [
        {"mode": mode, "stage": stage}
        for mode in ("torn", "lose-unsynced")
        for stage in (None, "data", "renamed")
    ],
    evidence=[effect(verifier="big.bin has checksum 1, not 2")],
    elsewhere=[[effect(number=1, verifier="bad")], [effect(fault="g", verifier="bad")]],
)
