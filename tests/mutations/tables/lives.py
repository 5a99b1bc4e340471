"""Lines of a life, a generation or a checkpoint that are gone, and failures of another cause than
the log shows.
"""

from __future__ import annotations

from tests.mutations.tape import FAIL, Change, Mutation, Tape, all_of, drop, edit, first, in_control
from trainchaos.chaos.events.log import Kind

SPAWNED, READY, EXIT = Kind.PROCESS_SPAWNED, Kind.PROCESS_READY, Kind.PROCESS_EXITED
STARTED, TRAINS, FORMED, HELD = (
    Kind.GENERATION_STARTED,
    Kind.GENERATION_READY,
    Kind.GROUP_FORMED,
    Kind.STATE_READY,
)
BEGUN, DONE, FAILED = Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_COMMITTED, Kind.FAILURE_DETECTED
BUILT_IN = ("drop-replica", "hot-spare", "checkpoint-restart", "takeover", "node")
COMMANDS = ("script", "compare")


def _never_was(process: str) -> Change:
    """Nothing is left of a process."""

    def do(tape: Tape) -> None:
        mine = [
            row for row in tape.rows if row.actor == process or row.data.get("process") == process
        ]
        assert len(mine) > 2
        tape.drop(mine)

    return do


def _cause(cause: str, **which: object) -> Change:
    """The first failure has another cause."""
    return first(lambda row: row.data.update(cause=cause), FAILED, **which)


def _without_its_words(cause: str) -> Change:
    """The same, and the detail does not give it away."""
    return first(lambda row: row.data.update(cause=cause, detail="as was seen"), FAILED)


def _again(tape: Tape) -> None:
    """A rank's end is written down twice."""
    tape.add(tape.find(EXIT, process="w0")[0])


def _differed(tape: Tape) -> None:
    """The failure is said to be one of state, at a step of which all digests are the same."""
    row = tape.find(FAILED)[0]
    row.step = 16
    row.data.update(cause="diverged", detail="as was seen")


def _last(kind: Kind) -> Change:
    """Without the last line of a kind."""
    return lambda tape: tape.drop(tape.find(kind)[-1:])


def _saved(step: int, *kinds: Kind) -> Change:
    """Without lines of the checkpoint of a step."""
    return all_of(*(drop(kind, step=step) for kind in kinds))


def _of_all(base: str) -> list[Mutation]:
    """What must be seen of any kind of run. ``w1`` or ``w2`` is whom the fault hits."""
    hit = "w1" if base in (*COMMANDS, "agents") else "w2"

    def mutation(name: str, change: Change, **seen: str) -> Mutation:
        return Mutation(f"{base}: {name}", base, change, **seen)

    return [
        mutation("a rank was never started", drop(SPAWNED, process="w0"), lifecycle=FAIL),
        mutation("who failed was never started", drop(SPAWNED, process=hit), lifecycle=FAIL),
        mutation(
            "a rank ended as another process", edit(EXIT, {"pid": 1}, process=hit), lifecycle=FAIL
        ),
        mutation(
            "the recovery's generation was never begun", drop(STARTED, generation=2), lifecycle=FAIL
        ),
        mutation("a kill was a hang, it is said", _cause("hang"), lifecycle=FAIL),
        mutation(
            "a kill was a hang, in other words too", _without_its_words("hang"), lifecycle=FAIL
        ),
        mutation(
            "a kill was another one, it is said",
            first(lambda row: row.data.update(detail="signal 11"), FAILED),
            lifecycle=FAIL,
        ),
    ]


def _of_built_in(base: str) -> list[Mutation]:
    def mutation(name: str, change: Change, **seen: str) -> Mutation:
        return Mutation(f"{base}: {name}", base, change, **seen)

    return [
        mutation("a rank never was ready", drop(READY, process="w0"), lifecycle=FAIL),
        mutation("a generation never was ready", drop(TRAINS, generation=1), lifecycle=FAIL),
        mutation("the last generation never was ready", _last(TRAINS), lifecycle=FAIL),
        mutation("a rank never joined its group", _last(FORMED), lifecycle=FAIL),
        mutation("a rank never held its state", _last(HELD), lifecycle=FAIL),
        mutation("a kill was an error, it is said", _cause("error"), lifecycle=FAIL),
        mutation("a kill was a late start, it is said", _cause("start-timeout"), lifecycle=FAIL),
        mutation("a kill was a notice, it is said", _cause("notice"), lifecycle=FAIL),
        mutation("a kill was a NaN, it is said", _without_its_words("nonfinite"), lifecycle=FAIL),
        mutation("a save was never begun", _last(BEGUN), lifecycle=FAIL),
        mutation("a save has no end", _last(DONE), lifecycle=FAIL),
        mutation("in the control a rank never was ready", in_control(drop(READY)), lifecycle=FAIL),
    ]


MUTATIONS = [
    Mutation(
        "nothing says that a rank was ready", "hot-spare", drop(READY, process="w0"), lifecycle=FAIL
    ),
    Mutation(
        "a spare that waits was never ready", "hot-spare", drop(READY, process="s4"), lifecycle=FAIL
    ),
    Mutation("the spare started anew never was", "hot-spare", _never_was("s5"), lifecycle=FAIL),
    Mutation(
        "the spare started anew never was ready",
        "hot-spare",
        drop(READY, process="s5"),
        lifecycle=FAIL,
    ),
    Mutation(
        "a rank was started twice",
        "hot-spare",
        first(lambda row: row.data.update(process="w0"), SPAWNED, process="w1"),
        lifecycle=FAIL,
    ),
    Mutation("the keeper was never started", "memory", drop(SPAWNED, process="k0"), lifecycle=FAIL),
    Mutation("a checkpoint never was", "hot-spare", _saved(16, BEGUN, DONE), lifecycle=FAIL),
    Mutation(
        "an acknowledged checkpoint never was",
        "hot-spare",
        all_of(_saved(16, BEGUN, DONE), drop(Kind.CHECKPOINT_DELETED, step=16)),
        lifecycle=FAIL,
    ),
    Mutation(
        "what was restored has no name",
        "checkpoint-restart",
        edit(TRAINS, {"checkpoint": None}, generation=2),
        lifecycle=FAIL,
    ),
    Mutation(
        "nobody restored what is said to be",
        "checkpoint-restart",
        edit(HELD, {"origin": "initial", "source": None}, generation=2, origin="checkpoint"),
        lifecycle=FAIL,
    ),
    Mutation(
        "another checkpoint was restored, say its members",
        "checkpoint-restart",
        edit(HELD, {"source": "step-00000008"}, generation=2, origin="checkpoint"),
        lifecycle=FAIL,
    ),
    Mutation(
        "a rank held another step",
        "drop-replica",
        first(lambda row: setattr(row, "step", 8), HELD, generation=2),
        lifecycle=FAIL,
    ),
    Mutation("a hang was an exit, it is said", "hang", _cause("exit"), lifecycle=FAIL),
    Mutation("a deadlock was an exit, it is said", "deadlock", _cause("exit"), lifecycle=FAIL),
    Mutation("an exception was a hang, it is said", "exception", _cause("hang"), lifecycle=FAIL),
    Mutation("a NaN was a difference, it is said", "nan", _cause("diverged"), lifecycle=FAIL),
    Mutation("a NaN was an exit, it is said", "nan", _cause("exit"), lifecycle=FAIL),
    Mutation("no rank refused a NaN", "nan", drop(Kind.NONFINITE_CAUGHT), lifecycle=FAIL),
    Mutation(
        "a failure is gone",
        "two kills",
        lambda tape: tape.drop(tape.find(FAILED)[:1]),
        lifecycle=FAIL,
    ),
    Mutation("the only failure is gone", "hot-spare", drop(FAILED), lifecycle=FAIL),
    Mutation("the only failure of a node is gone", "agents", drop(FAILED), lifecycle=FAIL),
    Mutation("the only failure of a stack is gone", "compare", drop(FAILED), lifecycle=FAIL),
    Mutation(
        "the second attempt was never started",
        "script",
        drop(Kind.COMMAND_STARTED, attempt=2),
        lifecycle=FAIL,
    ),
    Mutation(
        "the first attempt never ended",
        "script",
        drop(Kind.COMMAND_ENDED, attempt=1),
        lifecycle=FAIL,
    ),
    Mutation(
        "a rank ended twice",
        "hot-spare",
        _again,
        lifecycle=FAIL,
    ),
    Mutation(
        "a save has no end, and the next begins", "hot-spare", drop(DONE, step=24), lifecycle=FAIL
    ),
    *(
        Mutation(
            f"{base}: what was restored was never committed",
            base,
            drop(DONE, step=16),
            lifecycle=FAIL,
        )
        for base in ("checkpoint-restart", "drop-replica", "node")
    ),
    Mutation(
        "who is said to have failed ended well",
        "script",
        edit(EXIT, {"exit_code": 0, "signal": None, "expected": True}, process="w1"),
        lifecycle=FAIL,
    ),
    Mutation(
        "a rank that hangs ended unasked", "hang", edit(EXIT, {"expected": False}), lifecycle=FAIL
    ),
    Mutation("a kill was a difference, it is said", "hot-spare", _differed, lifecycle=FAIL),
    *(mutation for base in (*BUILT_IN, "agents", *COMMANDS) for mutation in _of_all(base)),
    *(mutation for base in (*BUILT_IN, "agents") for mutation in _of_built_in(base)),
]
