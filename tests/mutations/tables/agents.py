"""A job on nodes with agents of their own: what is written where, by whose clock, and what is lost
with a node.
"""

from __future__ import annotations

from tests.mutations.tape import (
    FAIL,
    OPEN,
    Change,
    Mutation,
    Tape,
    all_of,
    drop,
    edit,
    goes_on,
    in_control,
)
from trainchaos.chaos.events.log import Kind

EXIT, LANDED = Kind.PROCESS_EXITED, Kind.FAULT_LANDED


def _elsewhere(node: int) -> Change:
    """A node is another machine, with a clock of its own, which its agent measures as it does."""
    return edit(Kind.NODE_JOINED, {"boot": "of another machine"}, node=node)


def _of_another_rank(tape: Tape) -> None:
    """What a rank trained on in its last step is another's."""
    (other,) = tape.find(Kind.BATCH_TAKEN, step=25, rank=0)
    tape.find(Kind.BATCH_TAKEN, step=25, rank=1)[0].data["samples"] = list(other.data["samples"])


MUTATIONS = [
    Mutation(
        "another node was lost",
        "agents",
        edit(Kind.FAULT_INJECTED, {"target": {"nodes": [2], "processes": ["s2"]}}),
        landing=FAIL,
    ),
    Mutation("a rank of a lost machine trains on", "agents", goes_on("w1"), landing=FAIL),
    Mutation(
        "a rank of a lost machine ended well",
        "agents",
        edit(EXIT, {"signal": None, "exit_code": 0}, process="w1"),
        landing=OPEN,
    ),
    Mutation(
        "a node's clock was never measured",
        "agents",
        all_of(_elsewhere(0), drop(Kind.CLOCK_MEASURED, node=0)),
        evidence_complete=OPEN,
    ),
    Mutation(
        "two ranks train on the same samples", "agents", _of_another_rank, sample_accounting=FAIL
    ),
    Mutation(
        "a spare of another node was started",
        "agents",
        edit(Kind.RUN_STARTED, {"spares": 2}),
        membership=FAIL,
    ),
    Mutation(
        "a rank of the control is never seen to end",
        "agents",
        in_control(drop(EXIT, process="w1")),
        no_orphans=FAIL,
    ),
]
