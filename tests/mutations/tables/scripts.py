"""A command that was watched from outside, and a comparison of such commands: all that is known is
one file.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.mutations.tables.identities import at_step, injected
from tests.mutations.tape import (
    FAIL,
    MS,
    OPEN,
    Change,
    Mutation,
    Tape,
    drop,
    each,
    edit,
    in_both,
    in_control,
    the_injection,
)
from trainchaos.chaos.events.log import Kind

EXIT, LANDED, REPORT = Kind.PROCESS_EXITED, Kind.FAULT_LANDED, Kind.STEP_REPORTED


def _reports_on(tape: Tape) -> None:
    """A rank that was killed reports steps for two seconds more."""
    like = tape.find(REPORT, generation=1, rank=1)[-1]
    failed = tape.find(Kind.FAILURE_DETECTED)[-1]
    for row in tape.find(None, after=failed.time_ns):
        row.time_ns += 2500 * MS
    for number in range(1, 9):
        at = failed.time_ns + 300 * number * MS
        tape.add(like, step=(like.step or 0) + number, time_ns=at, data={"reported_ns": at})


def _starts_over(tape: Tape) -> None:
    """Before it goes on from its checkpoint it reports the steps before that once more."""
    begun = tape.find(REPORT, generation=2)[0].time_ns
    done = [row for row in tape.find(REPORT, generation=1) if (row.step or 0) <= 10]
    for number, row in enumerate(done):
        at = begun - (len(done) - number) * 10 * MS
        tape.add(row, generation=2, time_ns=at, data={"reported_ns": at})


def _crawls(tape: Tape) -> None:
    """Steps take ten times as long after the restart."""
    begun = tape.find(REPORT, generation=2)[0].time_ns
    for row in tape.rows:
        if row.time_ns > begun:
            row.time_ns = begun + 10 * (row.time_ns - begun)
        if row.data.get("reported_ns", 0) > begun:
            row.data["reported_ns"] = begun + 10 * (row.data["reported_ns"] - begun)


def _declared(tape: Tape) -> None:
    """A hang that was none, in a job that nothing was done to."""
    assert tape.other is not None
    like = tape.find(Kind.FAILURE_DETECTED)[0]
    at = tape.other.find(REPORT, step=20)[0].time_ns + 1
    row = tape.other.add(like, time_ns=at, data={"cause": "hang", "process": "w0", "rank": 0})
    row.actor = "orchestrator"


def _swapped(tape: Tape) -> None:
    assert tape.other is not None
    tape.rows, tape.other.rows = tape.other.rows, tape.rows


def _hit_there_too(tape: Tape) -> None:
    """The fault is in the control as well."""
    assert tape.other is not None
    hit = the_injection(tape)
    at = tape.other.find(REPORT, step=20)[0].time_ns + 1
    tape.other.add(hit, time_ns=at)


def _runs_back(tape: Tape) -> None:
    tape.keep_numbers = True
    a, b = tape.find(REPORT, rank=0)[3:5]
    a.time_ns, b.time_ns = b.time_ns, a.time_ns


def _loss(value: object, since: int) -> Change:
    return each(REPORT, lambda data: data.update(loss=value), since=since)


def _first_blames(process: str, rank: int) -> Change:
    """The first failure names another, and so does the second."""

    def do(tape: Tape) -> None:
        for row in tape.find(Kind.FAILURE_DETECTED):
            row.data.update(process=process, rank=rank)

    return do


def _ends(**values: object) -> Change:
    """The last attempt ended otherwise."""
    return lambda tape: tape.find(Kind.COMMAND_ENDED)[-1].data.update(values)


def _doubled(tape: Tape) -> None:
    """Every rank says that it trained on twice as many samples, once the job was started again."""
    for row in tape.find(REPORT, generation=2):
        row.data["samples"] *= 2


def _of(base: str) -> list[Mutation]:
    """What must be seen of any command."""

    def mutation(name: str, change: Change, **seen: str) -> Mutation:
        return Mutation(f"{base}: {name}", base, change, **seen)

    return [*_of_processes(mutation), *_of_the_plan(mutation)]


def _of_processes(mutation: Callable[..., Mutation]) -> list[Mutation]:
    """Of who ended how, and of what."""
    return [
        mutation(
            "a killed rank ended by itself",
            edit(EXIT, {"signal": None, "exit_code": 1}, process="w1"),
            landing=FAIL,
        ),
        mutation(
            "a killed rank ended of another signal",
            edit(EXIT, {"signal": 11}, process="w1"),
            landing=FAIL,
        ),
        mutation(
            "only the injector says that it landed",
            edit(LANDED, {"witness": "injector"}),
            fault_landed=OPEN,
        ),
        mutation("nobody says that it landed", drop(LANDED), landing=FAIL),
        mutation("a rank is never seen to end", drop(EXIT, process="w3"), no_orphans=FAIL),
        mutation(
            "a process is left",
            edit(Kind.LEFTOVERS, {"processes": [{"pid": 7, "process": "w1"}]}),
            no_orphans=FAIL,
        ),
        mutation("nobody looked for leftovers", drop(Kind.LEFTOVERS), no_orphans=OPEN),
        mutation(
            "it left a process running",
            edit(
                Kind.COMMAND_ENDED,
                {"left": [{"pid": 7, "name": "loader", "detached": True}]},
                exit_code=0,
            ),
            no_orphans=FAIL,
        ),
        mutation("the command of a job that is done failed", _ends(exit_code=1), ending=FAIL),
        mutation(
            "the command of a job that is done was killed",
            _ends(exit_code=None, signal=9),
            ending=FAIL,
        ),
        mutation(
            "the command of a job that is done was asked to end", _ends(asked=True), ending=FAIL
        ),
        mutation("nobody saw the command end", drop(Kind.COMMAND_ENDED), ending=FAIL),
    ]


def _of_the_plan(mutation: Callable[..., Mutation]) -> list[Mutation]:
    """Of what was to happen, and of what was said of it."""
    return [
        mutation("the job gave up", edit(Kind.RUN_FINISHED, {"outcome": "gave-up"}), liveness=FAIL),
        mutation("the other rank is blamed", _first_blames("w0", 0), detection=FAIL),
        mutation("a failure without a fault", _declared, detection=FAIL),
        mutation("another seed", edit(Kind.RUN_STARTED, {"seed": 99}), identity=FAIL),
        mutation("more steps than asked for", edit(Kind.RUN_STARTED, {"steps": 41}), identity=FAIL),
        mutation(
            "another fault was planned",
            edit(Kind.FAULT_PLANNED, {"kind": "process-segv"}),
            identity=FAIL,
        ),
        mutation("a fault in the run without one", _hit_there_too, identity=FAIL),
        mutation(
            "it was planned for the other rank",
            injected(target={"process": "w1", "rank": 0}),
            identity=FAIL,
        ),
        mutation("it acted in another step", at_step(5), identity=FAIL),
        mutation("it acted in another phase", injected(phase="optimizer"), identity=FAIL),
        mutation(
            "it hit a process that is no rank",
            injected(target={"process": "w3", "rank": 1}),
            identity=FAIL,
        ),
        mutation("the runs are swapped", _swapped, identity=FAIL),
        mutation("the end is missing", drop(Kind.RUN_FINISHED), evidence_complete=OPEN),
        mutation(
            "a step that the run cannot have",
            lambda tape: setattr(tape.find(REPORT, step=30)[0], "step", 90),
            progress=OPEN,
        ),
        mutation(
            "one rank was found",
            edit(Kind.GENERATION_STARTED, {"members": ["w0"]}, generation=1),
            progress=OPEN,
        ),
    ]


MUTATIONS = [
    *_of("script"),
    *_of("compare"),
    Mutation("a killed rank reports steps", "script", _reports_on, progress=OPEN),
    Mutation("twice the samples after the restart", "script", _doubled, progress=FAIL),
    Mutation("the job starts over", "script", _starts_over, kept_progress=FAIL),
    Mutation("it crawls after the restart", "script", _crawls, liveness=FAIL),
    Mutation(
        "it ends on losses that are no numbers",
        "script",
        in_both(_loss("nan", 33)),
        finite_losses=FAIL,
    ),
    Mutation("a loss is another one", "script", _loss(0.5, 20), loss_equality=OPEN),
    Mutation(
        "a command that had ended well was started again",
        "script",
        edit(Kind.COMMAND_ENDED, {"exit_code": 0}, attempt=1),
        ending=FAIL,
    ),
    Mutation("lines are written in another order", "script", _runs_back, evidence_complete=OPEN),
    Mutation(
        "an alarm in the control arm",
        "script",
        in_control(drop(Kind.RUN_FINISHED)),
        evidence_complete=OPEN,
    ),
]
