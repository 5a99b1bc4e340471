"""How rack-kill is tried."""

import dataclasses

from tests.support.fault_fakes import OCCURRENCE, FaultCase, exited, raised

BOTH = [exited(process="w1", signum=9), exited(process="w2", signum=9)]
CASE = FaultCase(
    occurrence=dataclasses.replace(
        OCCURRENCE, processes=("w1", "w2"), target={"nodes": [0, 1], "rack": 0}
    ),
    evidence=BOTH,
    elsewhere=[
        BOTH[:1],
        BOTH[1:],
        [BOTH[0], exited(process="w2", signum=11)],
        [BOTH[0], exited(process="w2", signum=9, asked_ns=20_000)],
        # of an error that the kill may have caused elsewhere
        [BOTH[0], raised("w2"), exited(process="w2", code=1)],
    ],
)
