"""State transitions of processes and generations in a log: what each event requires before it.

An event of a process counts as missing only if its log is complete (``complete_logs``): a rank
whose last lines were lost with its node wrote more than is known. The coordinator's lines are one
file, and are taken in their order.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.record.lost_node_evidence import silenced
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER
from trainchaos.recovery.policy.strategy import ANNOUNCED

_NUMBERED = re.compile(r"^[ws](\d+)$")
_FirstLines = dict[tuple[str, Kind], Event]
_ANSWERS = ("failure", "refill", "resumed", "shrunk")
_TRAINS = (Kind.STATE_READY, Kind.BATCH_TAKEN, Kind.STEP_COMMITTED, Kind.CHECKPOINT_SAVING)


def own_lines(log: Log) -> tuple[Event, ...]:
    """The coordinator's lines, in order."""
    return log.actors[ORCHESTRATOR].events if ORCHESTRATOR in log.actors else ()


def complete_logs(log: Log) -> frozenset[str]:
    """Processes whose logs hold everything that they wrote."""
    whole = {name for name, actor in log.actors.items() if not actor.problems}
    return frozenset(whole - silenced(log) - {ORCHESTRATOR})


def keepers_of(log: Log) -> frozenset[str]:
    """Processes that keep checkpoints and do not train."""
    return frozenset(
        e.data["process"] for e in log.of(Kind.PROCESS_SPAWNED) if e.data["role"] == KEEPER
    )


def processes(history: History) -> Iterator[str]:
    """Contradictions in the lives of processes: one that is ready, ends, trains or writes was
    started once, and one that gets a rank was ready for it.
    """
    log = history.log
    started: dict[str, Event] = {}
    ready: set[str] = set()
    gone: set[str] = set()
    adopted = False  # after a takeover all processes report anew
    for event in own_lines(log):
        name = event.data.get("process")
        match event.kind:
            case Kind.PROCESS_SPAWNED:
                if name in started:
                    yield f"{name} was started twice"
                started[str(name)] = event
            case Kind.PROCESS_READY:
                if name not in started or name in gone:
                    yield (
                        f"{name} was ready"
                        f" {'after its end' if name in gone else 'and never started'}"
                    )
                elif name in ready and not adopted:
                    yield f"{name} was ready twice"
                ready.add(str(name))
            case Kind.COORDINATOR_ADOPTED:
                adopted = True
            case Kind.PROCESS_EXITED:
                yield from _ends(event, started, gone)
                if not (adopted or name in ready) and _was_asked(history, event, started):
                    yield (
                        f"{name} ended when it was asked to, which only reaches a ready process,"
                        " and never was ready"
                    )
                gone.add(str(name))
            case Kind.FAILURE_DETECTED if name is not None:
                if name not in started:
                    yield f"{name} failed, and was never started"
            case Kind.GENERATION_STARTED:
                yield from _joins(history, event, started, ready, gone)
    yield from (f"{name} wrote lines, and was never started" for name in _strangers(log, started))
    # on nodes a start may fail and use up its number
    if not any(True for _ in log.of(Kind.NODE_JOINED)):
        yield from _unnumbered(started)
    if history.outcome == "completed" and not history.info.observed:
        yield from _decided(history)


def _ends(event: Event, started: Mapping[str, Event], gone: set[str]) -> Iterator[str]:
    name = event.data["process"]
    if name not in started:
        yield f"{name} ended, and was never started"
    elif name in gone:
        yield f"{name} ended twice"
    elif started[name].data["pid"] != event.data["pid"]:
        yield (
            f"{name} was started as process {started[name].data['pid']}, and ended as"
            f" {event.data['pid']}"
        )


def _was_asked(history: History, event: Event, started: Mapping[str, Event]) -> bool:
    """Whether a process ended by itself because the coordinator asked it to. A process that is
    still starting is killed instead, and one that got a notice may end earlier.
    """
    name, data = event.data["process"], event.data
    if history.info.observed or name not in started or started[name].data["role"] == KEEPER:
        return False
    noticed = {
        e.data["process"]
        for e in history.log.of(Kind.FAILURE_DETECTED)
        if e.data["cause"] == "notice"
    }
    return bool(data["expected"]) and data["exit_code"] == 0 and name not in noticed


def _joins(
    history: History, event: Event, started: Mapping[str, Event], ready: set[str], gone: set[str]
) -> Iterator[str]:
    number, members = event.generation, event.data["members"]
    for name in members:
        if name not in started:
            yield f"{name} is a member of generation {number}, and was never started"
        elif not history.info.observed and name not in ready:
            yield f"{name} is a member of generation {number}, and never was ready"
    if history.info.observed:
        before = {m for g in history.generations if g.number < number for m in g.members}
        yield from (
            f"generation {number} counts {n}, which had ended"
            for n in members
            if n in gone & before
        )
    elif number == 1:
        waiting = [name for name, its in started.items() if its.data["role"] != KEEPER]
        declared = {
            e.data["process"] for e in history.log.of(Kind.FAILURE_DETECTED) if e.seq < event.seq
        }
        for name in waiting:
            if name not in ready | gone | declared:
                yield f"the first generation began before {name} was ready"


def _strangers(log: Log, started: Mapping[str, Event]) -> list[str]:
    return sorted(name for name in log.actors if name != ORCHESTRATOR and name not in started)


def _unnumbered(started: Mapping[str, Event]) -> Iterator[str]:
    """Processes are numbered as they are started, ranks and spares together."""
    found = {int(match[1]) for name in started if (match := _NUMBERED.match(name))}
    missing = sorted(set(range(max(found, default=-1) + 1)) - found)
    if missing:
        yield (
            f"no process has the number {missing[0]}, and {max(found)} have been started after the"
            " first"
        )


def _decided(history: History) -> Iterator[str]:
    """Every process started after the first generation was decided on, and vice versa. A
    coordinator that is lost in between may have decided without starting.
    """
    own = own_lines(history.log)
    first = next((e.seq for e in own if e.kind is Kind.GENERATION_STARTED), len(own))
    later = [e for e in own if e.seq > first]
    if any(e.kind is Kind.COORDINATOR_ADOPTED for e in own):
        return
    actions = [a for e in later if e.kind is Kind.DECISION for a in e.data["actions"]]
    due = sum(str(action).startswith("spawn ") for action in actions)
    came = sum(e.kind is Kind.PROCESS_SPAWNED and e.data["role"] != KEEPER for e in later)
    if came != due:
        yield (
            f"{due} processes were to be started after the first generation began, and {came} were"
        )


def commands(history: History) -> Iterator[str]:
    """Contradictions in the attempts of a command: each is started, then ends, and ranks belong to
    one that runs.
    """
    attempt, runs = 0, False
    for event in own_lines(history.log):
        if event.kind is Kind.COMMAND_STARTED:
            if runs or event.data["attempt"] != attempt + 1:
                yield (
                    f"attempt {event.data['attempt']} of the command was started after attempt"
                    f" {attempt}"
                )
            attempt, runs = event.data["attempt"], True
        elif event.kind is Kind.COMMAND_ENDED:
            if not runs or event.data["attempt"] != attempt:
                yield f"attempt {event.data['attempt']} of the command ended, and was never started"
            runs = False
        elif event.kind in (Kind.PROCESS_SPAWNED, Kind.GENERATION_STARTED) and not runs:
            what = event.data.get("process") or f"generation {event.generation}"
            yield f"{what} began while no attempt of the command was running"


def generations(history: History) -> Iterator[str]:
    """Contradictions in generations: they are numbered without a gap, every line is of one that was
    started, and a rank that trains in one has joined its group and holds its state, as the
    coordinator knows.
    """
    log = history.log
    numbers = [
        event.generation for event in own_lines(log) if event.kind is Kind.GENERATION_STARTED
    ]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"generations are numbered {', '.join(map(str, numbers))}"
    known = frozenset({0, *numbers})
    if not all(known.issuperset(actor.generations) for actor in log.actors.values()):
        others = (event.generation for event in log.events if event.generation not in known)
        for number in dict.fromkeys(others):
            yield f"generation {number} has lines, and was never started"
    yield from _failures_counted(log)
    yield from _skips_without_parking(log)
    whole, said = complete_logs(log), first_lines(log)
    if not history.info.observed:
        for name in sorted(whole):
            yield from _elsewhere(log.actors[name], name)
    for generation in history.generations:
        yield from _answers(history, generation)
        yield from _unparked(history, generation)
        yield from _aborted_unparked(history, generation)
        if not history.info.observed:
            yield from _formed(history, generation, whole, said[generation.number])


def _failures_counted(log: Log) -> Iterator[str]:
    numbers = [e.data["failure"] for e in own_lines(log) if e.kind is Kind.FAILURE_DETECTED]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"failures are numbered {', '.join(map(str, numbers))}"


def _answers(history: History, generation: Generation) -> Iterator[str]:
    """A generation that answers a failure has one to answer, declared since the last ready
    generation; or announced.
    """
    number = generation.number
    if number == 1 or generation.cause not in _ANSWERS:
        return
    ready = (g.number for g in history.generations if g.number < number and g.ready_ns is not None)
    since = max(ready, default=1)
    due = [
        e
        for e in history.log.of(Kind.FAILURE_DETECTED)
        if e.generation < number and (e.generation >= since or e.data["cause"] in ANNOUNCED)
    ]
    if not due:
        yield f"generation {number} answers a failure ({generation.cause}), and none was declared"


def _unparked(history: History, generation: Generation) -> Iterator[str]:
    """Survivors whose state is kept have parked, and the coordinator logged it. Survivors on their
    way to a pause had already parked for that.
    """
    number, own = generation.number, own_lines(history.log)
    if number == 1 or generation.cause != "failure" or generation.state not in ("peer", "kept"):
        return
    since = [e for e in own if e.generation == number - 1]
    paused = any(
        "pause" in str(a)  # with or without a checkpoint
        for e in since
        if e.kind is Kind.DECISION
        for a in e.data["actions"]
    )
    kinds = {e.kind for e in since}
    if not paused and not kinds & {Kind.SURVIVORS_PARKED, Kind.COORDINATOR_ADOPTED}:
        yield (
            f"generation {number} goes on with the state of survivors, none of which is said to"
            " have parked"
        )


def _aborted_unparked(history: History, generation: Generation) -> Iterator[str]:
    """The coordinator waits until the survivors of an aborted generation have parked, and logs that
    before it forms the next one.
    """
    number, own = generation.number, own_lines(history.log)
    since = [e for e in own if e.generation == number - 1]
    aborted = next((e.seq for e in since if e.kind is Kind.ABORT_SENT), None)
    if aborted is None:
        return
    kinds = {e.kind for e in since if e.seq > aborted}
    if not kinds & {Kind.SURVIVORS_PARKED, Kind.COORDINATOR_ADOPTED}:
        yield (
            f"generation {number - 1} was aborted, and generation {number} began, without a word of"
            " who had parked"
        )


def _skips_without_parking(log: Log) -> Iterator[str]:
    """Samples are only left out after the ranks that reported them have parked."""
    heard: set[int] = set()
    for event in own_lines(log):
        if event.kind is Kind.COORDINATOR_ADOPTED:
            return
        if event.kind is Kind.SURVIVORS_PARKED:
            heard.add(event.generation)
        elif event.kind is Kind.SAMPLES_SKIPPED and event.generation not in heard:
            yield (
                f"samples were left out in generation {event.generation}, of which no rank is said"
                " to have parked"
            )


def _elsewhere(log: ActorLog, name: str) -> Iterator[str]:
    """A rank trains in the generation whose group it joined last."""
    joined: int | None = None
    for kind, number in zip(log.kinds, log.generations, strict=True):
        if kind is Kind.GROUP_FORMED:
            joined = number
        elif number != joined and joined is not None and kind in _TRAINS:
            what = f"{kind.value} of generation {number}"
            yield f"{name} wrote {what} after it had joined generation {joined}"


def first_lines(log: Log) -> Mapping[int, _FirstLines]:
    """Generation -> the first line of each kind that each process wrote about it."""
    return log.once("first lines", _first_lines)


def _first_lines(log: Log) -> Mapping[int, _FirstLines]:
    said: dict[int, _FirstLines] = defaultdict(dict)
    for kind in (Kind.GROUP_FORMED, Kind.STATE_READY, Kind.BATCH_TAKEN):
        for event in log.of(kind):
            said[event.generation].setdefault((event.actor, kind), event)
    return said


def _formed(
    history: History, generation: Generation, whole: Set[str], said: _FirstLines
) -> Iterator[str]:
    number, resume = generation.number, generation.resume_step or 0
    for name in generation.members:
        if name not in whole:
            continue
        worked = (name, Kind.BATCH_TAKEN) in said
        held = said.get((name, Kind.STATE_READY))
        if generation.ready_ns is None and not worked:
            continue
        if (name, Kind.GROUP_FORMED) not in said:
            yield f"{name} trained in generation {number}, whose group it never joined"
        elif held is None:
            yield f"{name} trained in generation {number}, whose state it never held"
        elif generation.ready_ns is not None and held.step != resume:
            yield f"{name} held step {held.step} in generation {number}, which resumed at {resume}"
        else:
            yield from _in_turn(name, number, said)
    yield from _announced(history, generation)


def _in_turn(name: str, number: int, said: _FirstLines) -> Iterator[str]:
    """A member joins its group, holds its state, then trains: lines of one file must be in this
    order, whatever the clocks.
    """
    turns = (Kind.GROUP_FORMED, Kind.STATE_READY, Kind.BATCH_TAKEN)
    lines = [said[name, kind] for kind in turns if (name, kind) in said]
    for first, then in itertools.pairwise(lines):
        if then.seq < first.seq:
            yield f"{name} wrote {then.kind.value} of generation {number} before {first.kind.value}"


def _announced(history: History, generation: Generation) -> Iterator[str]:
    """The coordinator logs a generation as ready once all members are, with the members that it
    started with.
    """
    log, number = history.log, generation.number
    for event in log.of(Kind.GENERATION_READY):
        if event.generation == number and tuple(event.data["members"]) != generation.members:
            yield f"generation {number} was ready with other members than it began with"
    if (
        generation.ready_ns is None
        and history.runs_of(number)
        and _must_have_heard(history, generation)
    ):
        yield f"generation {number} committed steps, and was never ready"


def _must_have_heard(history: History, generation: Generation) -> bool:
    """Whether the coordinator knew that all members held their state: it ended the job with them,
    had since heard from all of them, or made a decision before any failure. A coordinator that took
    over may never have known.
    """
    number, resume = generation.number, generation.resume_step or 0
    mine = [e for e in own_lines(history.log) if e.generation == number]
    taken = next((n for n, e in enumerate(mine) if e.kind is Kind.COORDINATOR_ADOPTED), len(mine))
    if any(e.kind is Kind.REPLICAS_AGREED and (e.step or 0) > resume for e in mine[:taken]):
        return True
    settled = itertools.takewhile(lambda e: e.kind is not Kind.FAILURE_DETECTED, mine[:taken])
    if any(e.kind is Kind.DECISION for e in settled):
        return True
    last = number == history.generations[-1].number
    return last and history.outcome == "completed" and taken == len(mine)
