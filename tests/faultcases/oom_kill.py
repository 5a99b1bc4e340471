"""How oom-kill is tried."""

from tests.support.fault_fakes import FaultCase, effect, exited

CASE = FaultCase(
    variants=[{}, {"spare_mib": 8}],
    evidence=[effect(oom_kills=1), exited(signum=9)],
    elsewhere=[
        [effect(oom_kills=1)],
        [exited(signum=9)],
        [effect(oom_kills=0), exited(signum=9)],
        [effect(number=1, oom_kills=1), exited(signum=9)],
        [effect(oom_kills=1), exited(signum=11)],
        [effect(oom_kills=1), exited(signum=9, asked_ns=20_000)],
    ],
    restores=False,
)
