"""How node-kill is tried."""

import dataclasses

from tests.support.fault_fakes import OCCURRENCE, FaultCase, effect, exited

LOST = effect(actor="orchestrator", machines={"1": {}})
BOTH = [exited(process="w1", signum=9), exited(process="w2", signum=9)]
CASE = FaultCase(
    occurrence=dataclasses.replace(OCCURRENCE, processes=("w1", "w2"), target={"nodes": [1]}),
    evidence=BOTH,
    elsewhere=[
        BOTH[:1],
        BOTH[1:],
        [BOTH[0], exited(process="w2", signum=11)],
        [BOTH[0], exited(process="w2", signum=9, asked_ns=20_000)],
        [LOST, *BOTH],
        [LOST, effect(actor="orchestrator", nodes={"1": {"state": "running"}}), *BOTH],
        [LOST, effect(actor="orchestrator", nodes={"1": {"state": "exited"}}), BOTH[0]],
    ],
)
