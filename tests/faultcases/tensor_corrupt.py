"""How tensor-corrupt is tried."""

from tests.support.fault_fakes import FaultCase, effect

OPS = ("nan", "inf", "bitflip", "scale", "stale", "zero")
SURFACES = ("gradient", "parameter", "loss", "activation", "input", "optimizer_state", "rng")

CASE = FaultCase(
    variants=[
        {"surface": surface, "op": op}
        for surface in SURFACES
        for op in OPS
        if surface != "rng" or op in ("bitflip", "stale", "zero")
    ],
    evidence=[effect(before="aa", after="bb")],
    elsewhere=[
        [effect(number=1, before="aa", after="bb")],
        [effect(fault="g", before="aa", after="bb")],
    ],
)
