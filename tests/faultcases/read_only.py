"""How read-only is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    evidence=[effect(errno="EROFS")],
    elsewhere=[
        [effect(errno="ENOSPC")],
        [effect(number=1, errno="EROFS")],
        [effect(fault="g", errno="EROFS")],
    ],
)
