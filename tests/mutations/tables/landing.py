"""Faults that did not happen as the log says: landing is derived again."""

from __future__ import annotations

from typing import Any

from tests.mutations.tape import (
    FAIL,
    MS,
    OPEN,
    Change,
    Mutation,
    Row,
    Tape,
    all_of,
    drop,
    edit,
    goes_on,
    the_injection,
)
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind

COMMIT = Kind.STEP_COMMITTED
EXIT, EFFECT, LANDED, INJECTED = (
    Kind.PROCESS_EXITED,
    Kind.FAULT_EFFECT,
    Kind.FAULT_LANDED,
    Kind.FAULT_INJECTED,
)


def _never(tape: Tape) -> None:
    """Nothing is said of a fault but its plan."""
    for kind in (INJECTED, LANDED, EFFECT, Kind.FAULT_HEALED):
        tape.drop(tape.find(kind))


def _word_after(kind: Kind, process: str) -> Change:
    """A process writes something more 10 ms after it was reaped."""

    def do(tape: Tape) -> None:
        ended = tape.find(EXIT, process=process)[0]
        like = tape.find(kind)[0]
        tape.add(like, actor=process, time_ns=ended.time_ns + 10 * MS)

    return do


def _shown(**evidence: Any) -> Change:
    """The evidence that was seen is another."""

    def do(tape: Tape) -> None:
        hit = the_injection(tape)
        for row in tape.find(EFFECT, fault=hit.data["fault"]):
            row.data["evidence"] = {**row.data["evidence"], **evidence}

    return do


def _targets_change_places(tape: Tape) -> None:
    one, two = tape.find(INJECTED)
    one.data["target"], two.data["target"] = two.data["target"], one.data["target"]


def _faults_change_places(tape: Tape) -> None:
    one, two = tape.find(LANDED)
    one.time_ns, two.time_ns = two.time_ns, one.time_ns


def _wakes(tape: Tape) -> None:
    """A stopped process looks at the disk before it is killed."""
    landed, ended = tape.find(LANDED)[0].time_ns, tape.find(EXIT, process="w2")[0].time_ns
    like = tape.find(COMMIT, actor="w2")[-1]
    tape.add(like, kind=Kind.CHECKPOINT_KEPT, time_ns=(landed + ended) // 2).data = {
        "checkpoint": "",
        "error": "busy",
    }


def _works_while_it_hangs(tape: Tape) -> None:
    """Three steps between the act and the word that it hangs."""
    hit = the_injection(tape)
    until = tape.find(Kind.FAILURE_DETECTED)[0].time_ns
    like = tape.find(COMMIT, actor="w2")[-1]
    for number in (1, 2, 3):
        at = hit.time_ns + number * (until - hit.time_ns) // 4
        tape.add(like, time_ns=at, step=(like.step or 0) + number)


def _saved_on_it(tape: Tape) -> None:
    """A save that begins and ends on a disk that takes nothing."""
    landed, saved = tape.find(LANDED)[0], tape.find(Kind.CHECKPOINT_COMMITTED)[0]
    saving = tape.find(Kind.CHECKPOINT_SAVING)[0]
    for number, row in enumerate((saving, saved), start=1):
        tape.add(
            row, time_ns=landed.time_ns + number, step=13, data={"checkpoint": "step-00000013"}
        )


def _decides_headless(tape: Tape) -> None:
    lost, taken = tape.find(INJECTED, fault="lost")[0], tape.find(Kind.COORDINATOR_ADOPTED)[0]
    row = Row(Kind.DECISION, ORCHESTRATOR, (lost.time_ns + taken.time_ns) // 2, 1, None, {})
    row.data = {"actions": [], "reason": "nothing"}
    tape.rows.append(row)


def _restored(tape: Tape) -> None:
    """The spoilt checkpoint is what the last generation goes on from."""
    name = tape.find(INJECTED, fault="rot")[0].data["target"]["checkpoint"]
    tape.find(Kind.GENERATION_READY)[-1].data["checkpoint"] = name


def _was_expected(tape: Tape) -> None:
    tape.find(EXIT, process="w2")[0].data["expected"] = True


def _no_log(tape: Tape) -> None:
    tape.drop(tape.find(None, actor="w2"))


def _account_of(actor: str) -> Change:
    """The account of what was changed is another rank's."""

    def do(tape: Tape) -> None:
        for row in tape.find(EFFECT):
            if row.actor != ORCHESTRATOR:
                row.actor = actor

    return do


def _no_slower(tape: Tape) -> None:
    """The straggler computed as fast as ever."""
    usual = tape.find(COMMIT, actor="w2", step=10)[0].data["seconds"]
    for row in tape.find(COMMIT, actor="w2"):
        row.data["seconds"] |= {key: usual[key] for key in ("forward", "backward")}


MUTATIONS = [
    Mutation("the disk never was full", "full disk", _never, fault_landed=OPEN),
    Mutation(
        "a killed rank writes after its end", "hot-spare", _word_after(COMMIT, "w2"), landing=FAIL
    ),
    Mutation("a killed rank trains on", "drop-replica", goes_on("w2"), landing=FAIL),
    Mutation(
        "a killed rank ended well",
        "hot-spare",
        edit(EXIT, {"signal": None, "exit_code": 0}, process="w2"),
        landing=OPEN,
    ),
    Mutation(
        "a killed rank ended of itself",
        "hot-spare",
        edit(EXIT, {"signal": None, "exit_code": 1}, process="w2"),
        landing=FAIL,
    ),
    Mutation(
        "a killed rank ended of a crash",
        "drop-replica",
        edit(EXIT, {"signal": 11}, process="w2"),
        landing=FAIL,
    ),
    Mutation(
        "another was reaped", "hot-spare", edit(EXIT, {"process": "w7"}, process="w2"), landing=OPEN
    ),
    Mutation(
        "another rank was injected",
        "drop-replica",
        edit(INJECTED, {"target": {"process": "w1", "rank": 1}}),
        landing=FAIL,
    ),
    Mutation(
        "the targets of two kills change places", "two kills", _targets_change_places, landing=FAIL
    ),
    Mutation(
        "the times of two landings change places", "two kills", _faults_change_places, landing=FAIL
    ),
    Mutation(
        "both kills hit one rank",
        "two kills",
        edit(INJECTED, {"target": {"process": "w2", "rank": 2}}),
        landing=FAIL,
    ),
    Mutation("a stopped rank works on", "hang", _wakes, landing=FAIL),
    Mutation("a stopped rank never stood still", "hang", _shown(os_state="S"), landing=FAIL),
    Mutation("nobody looked at a stopped rank", "hang", drop(EFFECT), landing=FAIL),
    Mutation("a deadlocked rank works", "deadlock", _works_while_it_hangs, landing=FAIL),
    Mutation(
        "a deadlock is an exit",
        "deadlock",
        edit(Kind.FAILURE_DETECTED, {"cause": "exit"}),
        landing=FAIL,
    ),
    Mutation(
        "the notice was not heard",
        "notice",
        edit(Kind.FAILURE_DETECTED, {"cause": "error"}),
        landing=FAIL,
    ),
    Mutation(
        "the notice was another's",
        "notice",
        edit(Kind.FAILURE_DETECTED, {"process": "w1", "rank": 1}),
        landing=FAIL,
    ),
    Mutation("nothing was changed by a NaN", "nan", _shown(before="aa", after="aa"), landing=FAIL),
    Mutation("another rank speaks of the NaN", "nan", _account_of("w1"), landing=FAIL),
    Mutation("nobody speaks of the NaN", "nan", drop(EFFECT), landing=FAIL),
    Mutation("a straggler is as fast as ever", "straggler", _no_slower, landing=FAIL),
    Mutation("the verifier found nothing wrong", "rot", _shown(verifier=None), landing=FAIL),
    Mutation("a spoilt checkpoint is restored", "rot", _restored, checkpoint_integrity=FAIL),
    Mutation("a rank of a lost node trains on", "node", goes_on("w2"), landing=FAIL),
    Mutation(
        "a rank of a lost node was not killed",
        "node",
        edit(EXIT, {"signal": 15}, process="w3"),
        landing=FAIL,
    ),
    Mutation(
        "a rank of a lost node is not seen to end", "node", drop(EXIT, process="w3"), landing=OPEN
    ),
    Mutation(
        "an exception is another one",
        "exception",
        edit(Kind.ERROR_RAISED, {"type": "OSError"}),
        landing=FAIL,
    ),
    Mutation(
        "an exception ended nobody",
        "exception",
        edit(EXIT, {"exit_code": 0}, process="w2"),
        landing=OPEN,
    ),
    Mutation("no exception was raised", "exception", drop(Kind.ERROR_RAISED), landing=FAIL),
    Mutation("the disk took what was written", "full disk", _shown(errno=None), landing=FAIL),
    Mutation("a save ends on a disk that takes nothing", "full disk", _saved_on_it, landing=FAIL),
    Mutation("who was lost decides", "takeover", _decides_headless, landing=FAIL),
    Mutation("nobody took over", "takeover", drop(Kind.COORDINATOR_ADOPTED), landing=FAIL),
    Mutation(
        "the log of the killed rank is gone",
        "hot-spare",
        all_of(_was_expected, _no_log),
        landing=OPEN,
    ),
]
