"""Times that cannot be: clocks that are early, late or fast, and effects before their causes."""

from __future__ import annotations

from collections.abc import Callable

from tests.mutations.tape import (
    FAIL,
    MS,
    Change,
    Mutation,
    Tape,
    all_of,
    edit,
    in_control,
    move,
    the_injection,
)
from trainchaos.chaos.events.log import Kind


def clock(actor: str, by_ns: Callable[[int], float]) -> Change:
    """All that an actor says by another clock."""

    def do(tape: Tape) -> None:
        start = tape.find(Kind.RUN_STARTED)[0].time_ns
        for row in tape.find(None, actor=actor):
            row.time_ns += round(by_ns(row.time_ns - start))

    return do


def early(actor: str, ms: float) -> Change:
    """A clock that is behind."""
    return clock(actor, lambda _: -ms * MS)


def _detected_first(tape: Tape) -> None:
    """The failure is declared before the fault that caused it, by so much that it is explained all
    the same.
    """
    hit = the_injection(tape)
    declared = tape.find(Kind.FAILURE_DETECTED)[0]
    batch = max(row.time_ns for row in tape.find(None, actor=declared.data["process"]))
    hit.time_ns = min(hit.time_ns, batch - 3 * MS)
    declared.time_ns = batch - 2 * MS


def _earlier(base: str, ms: float, **which: str) -> Mutation:
    """An injection by itself at another time: what it is counted from."""
    name = f"{base}: a fault is injected {ms} ms before it was"
    return Mutation(name, base, move(Kind.FAULT_INJECTED, -ms, **which), happens_before=FAIL)


def _sooner(base: str, ms: float, what: str) -> Mutation:
    name = f"{base}: {what} is declared {ms} ms before it was"
    return Mutation(name, base, move(Kind.FAILURE_DETECTED, -ms), happens_before=FAIL)


def _all_later(tape: Tape) -> None:
    """The injection and what came of it at once, in the step after the one that it names."""
    for row in tape.find(None, fault="fault"):
        if row.kind in (
            Kind.FAULT_INJECTED,
            Kind.FAULT_LANDED,
            Kind.FAULT_EFFECT,
            Kind.FAULT_HEALED,
        ):
            row.time_ns += 80 * MS


MUTATIONS = [
    *(
        _earlier(base, 1000)
        for base in ("hot-spare", "hang", "script", "compare", "agents", "takeover")
    ),
    *(
        _earlier(base, 60)
        for base in ("hot-spare", "hang", "script", "compare", "node", "nan", "rot", "full disk")
    ),
    _earlier("unheld", 60, fault="fault"),
    _earlier("unheld", 70, fault="second"),
    Mutation("a fault is injected in the next step", "straggler", _all_later, happens_before=FAIL),
    _sooner("deadlock", 500, "a hang"),
    _sooner("hang", 60, "a stop"),
    _sooner("hang", 20, "a stop"),
    _sooner("hot-spare", 4, "a death"),
    _sooner("script", 20, "a death"),
    Mutation(
        "a hang is declared before its limit",
        "deadlock",
        edit(Kind.FAILURE_DETECTED, {"silent_s": 0.4}),
        happens_before=FAIL,
    ),
    Mutation(
        "a death comes before the blow",
        "hot-spare",
        all_of(move(Kind.PROCESS_EXITED, -10, process="w2"), move(Kind.FAILURE_DETECTED, -10)),
        happens_before=FAIL,
    ),
    Mutation("a rank's clock is 200 ms early", "hot-spare", early("w1", 200), happens_before=FAIL),
    Mutation("a spare's clock is 200 ms early", "hot-spare", early("s4", 200), happens_before=FAIL),
    Mutation("a rank's clock is 200 ms late", "hot-spare", early("w1", -200), happens_before=FAIL),
    Mutation("a rank's clock is 8 ms early", "hot-spare", early("w1", 8), happens_before=FAIL),
    Mutation(
        "a rank's clock is 1 % fast",
        "hot-spare",
        clock("w1", lambda ns: ns / 100),
        happens_before=FAIL,
    ),
    Mutation(
        "a rank's clock is 1 % slow in the control arm",
        "drop-replica",
        in_control(clock("w1", lambda ns: -ns / 100)),
        happens_before=FAIL,
    ),
    Mutation(
        "a death is declared before its cause", "hot-spare", _detected_first, happens_before=FAIL
    ),
    Mutation(
        "a fault is healed before it is injected",
        "straggler",
        move(Kind.FAULT_HEALED, -9000),
        happens_before=FAIL,
    ),
    Mutation(
        "the arm ends 200 ms early", "hot-spare", move(Kind.RUN_FINISHED, -200), happens_before=FAIL
    ),
    Mutation(
        "a survivor parks after it was decided",
        "hot-spare",
        move(Kind.PARKED, 40, actor="w0", generation=1),
        happens_before=FAIL,
    ),
]
