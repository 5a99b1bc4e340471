"""How gpu-hang is tried."""

from tests.support.fault_fakes import FaultCase, calm, declared

CASE = FaultCase(
    variants=[{}, {"hold_s": 0.4}],
    evidence=[declared("hang")],
    elsewhere=[[declared("exit")], [declared("hang", process="w2")], calm(collective_s=0.2)],
)
