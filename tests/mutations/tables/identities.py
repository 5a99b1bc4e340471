"""Logs of another arm, cell, seed or strategy than the run directory says, and faults that are not
those planned.
"""

from __future__ import annotations

from tests.mutations.tape import (
    FAIL,
    Change,
    Mutation,
    Tape,
    edit,
    in_both,
    the_injection,
)
from trainchaos.chaos.events.log import Kind


def _started(**values: object) -> Change:
    return edit(Kind.RUN_STARTED, values)


def _planned_at(step: int, phase: str) -> Change:
    def do(tape: Tape) -> None:
        for row in tape.find(Kind.FAULT_PLANNED):
            row.data["at"]["points"] = [[step, phase]]

    return do


def injected(**values: object) -> Change:
    """Other data of the first act, which it still lands by."""
    return lambda tape: the_injection(tape).data.update(values)


def at_step(step: int) -> Change:
    """It is said to have acted and landed in another step."""

    def do(tape: Tape) -> None:
        for row in (*tape.find(Kind.FAULT_INJECTED), *tape.find(Kind.FAULT_LANDED)):
            row.step = step

    return do


def _on_node(node: int) -> Change:
    """All that were hit stay the same."""
    return lambda tape: the_injection(tape).data["target"].update(nodes=[node])


def _of_another_member(tape: Tape) -> None:
    """The rank is the one planned, and the process another's."""
    the_injection(tape).data["target"]["process"] = "w1"


def _swapped(tape: Tape) -> None:
    """The two arms change places."""
    assert tape.other is not None
    tape.rows, tape.other.rows = tape.other.rows, tape.rows


MUTATIONS = [
    Mutation(
        "another strategy's label",
        "hot-spare",
        in_both(_started(strategy="drop-replica")),
        identity=FAIL,
    ),
    Mutation("another seed", "checkpoint-restart", _started(seed=18), identity=FAIL),
    Mutation("fewer steps than planned", "hot-spare", in_both(_started(steps=30)), identity=FAIL),
    Mutation(
        "pauses called evaluations",
        "hot-spare",
        in_both(_started(evaluate={"every": 1, "takes": 9})),
        identity=FAIL,
    ),
    Mutation("spares are declared away", "hot-spare", in_both(_started(spares=0)), identity=FAIL),
    Mutation("the arms are swapped", "hot-spare", _swapped, identity=FAIL),
    Mutation(
        "the fault was planned elsewhere", "hot-spare", _planned_at(21, "forward"), identity=FAIL
    ),
    Mutation(
        "another fault was planned",
        "hot-spare",
        edit(Kind.FAULT_PLANNED, {"kind": "process-segv"}),
        identity=FAIL,
    ),
    Mutation(
        "another fault acted",
        "hang",
        edit(Kind.FAULT_INJECTED, {"kind": "process-kill"}),
        identity=FAIL,
    ),
    Mutation(
        "it hit another rank, which all say",
        "straggler",
        edit(Kind.FAULT_INJECTED, {"target": {"process": "w1", "rank": 1}}),
        identity=FAIL,
    ),
    Mutation("it hit another node, it is said", "node", _on_node(0), identity=FAIL),
    Mutation(
        "it hit another member than the rank's", "straggler", _of_another_member, identity=FAIL
    ),
    Mutation("it acted in another phase", "hot-spare", injected(phase="forward"), identity=FAIL),
    Mutation(
        "a spare was hit instead",
        "straggler",
        injected(target={"process": "w2", "rank": None}),
        identity=FAIL,
    ),
]
