"""How process-stop is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    evidence=[effect(os_state="T")],
    elsewhere=[
        [effect(number=1, os_state="T")],
        [effect(fault="g", os_state="T")],
        [effect(os_state="R")],
    ],
)
