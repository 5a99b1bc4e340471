"""How gil-deadlock is tried."""

from tests.support.fault_fakes import FaultCase, calm, declared

CASE = FaultCase(
    variants=[{}, {"hold_s": 5.0}],
    evidence=[declared("hang")],
    elsewhere=[
        [declared("exit")],
        [declared("hang", process="w2")],
        [declared("hang", at_ns=20_000)],
        calm(collective_s=0.5),
    ],
)
