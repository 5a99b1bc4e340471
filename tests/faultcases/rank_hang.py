"""How rank-hang is tried."""

from tests.support.fault_fakes import FaultCase, calm, declared, effect

CASE = FaultCase(
    variants=[{}, {"how": "spin"}, {"how": "kernel", "hold_s": 0.4}],
    evidence=[declared("hang")],
    elsewhere=[
        [declared("exit")],
        [declared("hang", process="w2")],
        [declared("hang", at_ns=20_000)],
        calm(collective_s=0.2),
        [effect(script="hang")],
        [effect(watched_s=0.2, ran_s=0.0, queued_s=0.0)],
        [effect(script="hang"), effect(watched_s=0.2, ran_s=0.04, queued_s=0.08)],
    ],
)
