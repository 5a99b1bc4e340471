"""How tensor-corrupt is tried."""

from fault_fakes import FaultCase, effect

CASE = FaultCase(
    variants=[
        {"surface": surface, "op": op}
        for surface in ("gradient", "parameter", "loss")
        for op in ("nan", "inf", "bitflip")
    ],
    evidence=[effect(before="aa", after="bb")],
    elsewhere=[[effect(number=1, before="aa", after="bb")], [effect(fault="g", before="aa", after="bb")]],
)
