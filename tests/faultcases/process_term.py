"""How process-term is tried."""

from tests.support.fault_fakes import FaultCase, declared, exited

CASE = FaultCase(
    variants=[{}, {"grace_s": 0.5}],
    evidence=[declared("notice")],
    elsewhere=[
        [declared("notice", process="w2")],
        [declared("exit")],
        [exited(code=0)],
        [exited(code=1, asked_ns=20_600)],
    ],
)
