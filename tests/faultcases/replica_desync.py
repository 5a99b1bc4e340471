"""How replica-desync is tried."""

from tests.support.fault_fakes import FaultCase, effect

CASE = FaultCase(
    variants=[{}, {"amount": 0.1}],
    evidence=[effect(before="aa", after="bb")],
    elsewhere=[
        [effect(number=1, before="aa", after="bb")],
        [effect(fault="g", before="aa", after="bb")],
    ],
)
