"""How collective-skip is tried."""

from tests.support.fault_fakes import FaultCase, calm, declared

CASE = FaultCase(
    evidence=[declared("hang")],
    elsewhere=[[declared("exit")], [declared("hang", process="w2")], calm(collective_s=9.0)],
)
