"""How data-corrupt is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    variants=[{}, {"shift": 5}],
    evidence=[effect(before="aa", after="bb")],
    elsewhere=[
        [effect(number=1, before="aa", after="bb")],
        [effect(fault="g", before="aa", after="bb")],
    ],
)
