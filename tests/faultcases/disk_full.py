"""How disk-full is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    variants=[{"by": by} for by in ("ballast", "shrink")],
    evidence=[effect(errno="ENOSPC")],
    elsewhere=[
        [effect(errno="EROFS")],
        [effect(number=1, errno="ENOSPC")],
        [effect(fault="g", errno="ENOSPC")],
    ],
)
