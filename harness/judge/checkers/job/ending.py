"""How the arm ended: every process's exit status, and the job's final size."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, verdict_of
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.record.kept_in_memory import keepers
from trainchaos.harness.judge.results import Finding

IDLE_STEPS = 20
IDLE_S = 5.0
"""How long, in steps and in seconds, a ready process may wait while the job is short of ranks."""
LOST_STEPS = 10
LOST_S = 3.0
"""How long, in steps and in seconds, a place may be empty before a replacement is started, which is
decided after the first step of a generation.
"""
_LIVES_ON = ("nonfinite", "diverged")
_REPLACES_LOST: Mapping[str, str] = {
    "drop-replica": "rejoin",
    "hot-spare": "replenish",
    "adaptive": "",
}
"""Strategies that go on with fewer ranks -> the parameter that makes them start replacements; "":
they always do.
"""


def ending(evidence: Evidence) -> Finding:
    """Every process ended as requested or as a fault explains, and no survivor raised an error. A
    job that ended too small left no spare waiting or unstarted that could have filled it. For a
    command: a completed job's last attempt ended well.
    """
    history = evidence.history
    if history.info.observed:
        return _of_a_command(evidence)
    ends = _ends(evidence)
    problems = [*_exits(evidence, ends), *_errors(evidence, ends), *too_small(evidence)]
    world = history.worked[-1].world if history.worked else 0
    size = (
        f"{world} of {history.info.ranks} ranks at the end" if world else "no generation was formed"
    )
    return verdict_of(problems, f"{len(ends)} processes ended as asked or explained; {size}")


def _of_a_command(evidence: Evidence) -> Finding:
    """Judge a command's exits. The exit of a command that did not complete its job, or that the
    harness ended, proves nothing.
    """
    ended = list(evidence.log.of(Kind.COMMAND_ENDED))
    how = (
        f"its command ended with {_exit_text(ended[-1])}"
        if ended
        else "its command was never seen to end"
    )
    problems = []
    if evidence.history.outcome == "completed":
        if not ended or ended[-1].data["exit_code"] != 0 or ended[-1].data["signal"] is not None:
            problems.append(f"the job is said to be completed, and {how}")
        elif ended[-1].data["asked"]:
            problems.append("the job is said to be completed, and its command was asked to end")
    noticed = [
        e.time_ns for e in evidence.log.of(Kind.FAILURE_DETECTED) if e.data["cause"] == "notice"
    ]
    begun = sorted(e.time_ns for e in evidence.log.of(Kind.COMMAND_STARTED))
    for event in ended[:-1]:
        since = max((ns for ns in begun if ns < event.time_ns), default=0)
        preempted = any(since < ns < event.time_ns for ns in noticed)
        if event.data["exit_code"] == 0 and not preempted:
            problems.append(
                f"attempt {event.data['attempt']} of the command ended well, and was started again"
            )
    return verdict_of(problems, f"{how}; what else it did is not known")


class _End(NamedTuple):
    """One process's exit. ``asked_ns``: when it was first asked to end; None: never, or not known.
    ``hit``: a fault hit it, or it was declared failed.
    """

    event: Event
    asked_ns: int | None
    hit: bool


def _ends(evidence: Evidence) -> dict[str, _End]:
    log = evidence.log
    hit = {
        name
        for episode in evidence.measures.episodes
        for name in (*episode.processes, *episode.replica)
    }
    hit |= {event.data["process"] for event in log.of(Kind.FAILURE_DETECTED)}
    apart = keepers(log)
    return {
        name: _End(event, event.data.get("asked_ns"), name in hit)
        for event in log.of(Kind.PROCESS_EXITED)
        if (name := event.data["process"]) not in apart
    }


def _exit_text(event: Event) -> str:
    code, signum = event.data["exit_code"], event.data["signal"]
    if signum is None:
        return f"exit code {code}"
    known = signum in {each.value for each in signal.Signals}
    return signal.Signals(signum).name if known else f"signal {signum}"


def _exits(evidence: Evidence, ends: dict[str, _End]) -> Iterator[str]:
    history = evidence.history
    storage = any(
        episode.injected and not episode.processes for episode in evidence.measures.episodes
    )
    for name, end in ends.items():
        data, how = end.event.data, _exit_text(end.event)
        if not data["expected"] and end.asked_ns is None and not end.hit and not history.cut_short:
            yield f"{name} ended with {how}; no fault explains it, and it was not declared failed"
        odd = data["exit_code"] not in (None, 0) or data["signal"] not in (
            None,
            signal.SIGKILL.value,
        )
        if (
            odd
            and data["expected"]
            and not end.hit
            and not storage
            and history.outcome == "completed"
        ):
            yield f"{name} was asked to end, and ended with {how}"


def _errors(evidence: Evidence, ends: dict[str, _End]) -> Iterator[str]:
    """An error is the last event of a process and ends it, and is explained by a fault or by the
    end of the job.
    """
    history = evidence.history
    if evidence.log.first(Kind.ERROR_RAISED) is None:
        return
    for name, log in evidence.log.actors.items():
        for error, following in itertools.zip_longest(log.events, log.events[1:]):
            if error.kind is not Kind.ERROR_RAISED:
                continue
            what, end = f"{name} raised {error.data['type']}", ends.get(name)
            asked = end is not None and end.asked_ns is not None and end.asked_ns <= error.time_ns
            if following is not None:
                yield f"{what}, and went on"
            elif end is not None and end.event.data["exit_code"] == 0:
                yield f"{what}, and ended with exit code 0"
            elif not (
                asked or history.cut_short or history.unfinished or (end is not None and end.hit)
            ):
                yield f"{what}, and no fault explains it"


def too_small(evidence: Evidence) -> Iterator[str]:
    """In a job that ended with too few ranks: processes that were long ready to fill a replica, and
    places for which no process was started.
    """
    history = evidence.history
    if history.outcome != "completed" or not history.worked:
        return
    last = history.worked[-1]
    if last.world >= history.info.ranks:
        yield from _too_few_spares(evidence, last)
        return
    ended = f"the job ended with {last.world} of {history.info.ranks} ranks"
    idle = _idle(history, last)
    if _fills_a_replica(history, idle):
        steps = min(idle.values())
        yield f"{ended}, though {', '.join(sorted(idle))} had been ready for {steps} steps"
    spec = evidence.cell.scenario.recovery
    wanted = _REPLACES_LOST.get(spec.strategy)
    if wanted is not None and spec.params.get(wanted, True) is not False:
        steps = 0 if _excused(history, last) else _steps_without(history, last, 0)
        if steps:
            yield (
                f"{ended}, and no replacement was started for those lost in the {steps} steps that"
                " followed"
            )


def _too_few_spares(evidence: Evidence, last: Generation) -> Iterator[str]:
    """Spares that took ranks and were not replaced. Excused: spares that died while waiting are
    replaced after growing delays, and after the loss of a machine there may be no room for one.
    """
    history, spec = evidence.history, evidence.cell.scenario.recovery
    spares = history.info.spares
    if not spares or spec.params.get("replenish", True) is False or _excused(history, last):
        return
    steps = _steps_without(history, last, spares)
    if steps:
        yield (
            f"spares took ranks, and no replacements were started in the {steps} steps that"
            " followed"
        )


def _done(history: History, last: Generation, since_ns: int) -> list[int]:
    """End times of the last generation's committed steps that began after ``since_ns``."""
    runs = history.runs_of(last.number)
    return [run.end_ns for run in runs if run.committed_ns is not None and run.start_ns >= since_ns]


def _idle(history: History, last: Generation) -> dict[str, int]:
    """Processes that could have taken a rank, and for how many steps they waited."""
    log = history.log
    gone = {e.data["process"]: e for e in log.of(Kind.PROCESS_EXITED)}
    failed_ones = {event.data["process"] for event in log.of(Kind.FAILURE_DETECTED)}
    found = {}
    for event in log.of(Kind.PROCESS_READY):
        name = event.data["process"]
        since_ns = max(event.time_ns, last.ready_ns or last.started_ns)
        after = _done(history, last, since_ns)
        if name in last.members or name in failed_ones or len(after) < IDLE_STEPS:
            continue
        if not _left_before(gone.get(name), after[-1]) and (after[-1] - since_ns) / 1e9 >= IDLE_S:
            found[name] = len(after)
    return found


def _left_before(exited: Event | None, time_ns: int) -> bool:
    """Whether a process had ended, or had been asked to end, before ``time_ns``."""
    return (
        exited is not None
        and min(exited.data.get("asked_ns") or exited.time_ns, exited.time_ns) < time_ns
    )


def _fills_a_replica(history: History, idle: Mapping[str, int]) -> bool:
    """Whether the idle processes can fill a replica: one that held a shard, or follows one as a
    spare, only takes that shard, one that never did takes any.
    """
    placed = history.log.of(Kind.SPARE_PLACED)
    held = {str(event.data["process"]): int(event.data["shard"]) for event in placed}
    for generation in history.generations:
        held |= {name: rank % generation.shards for rank, name in enumerate(generation.members)}
    fresh = sum(name not in held for name in idle)
    return (
        bool(idle) and fresh + len({held[name] for name in idle if name in held}) >= history.shards
    )


def _steps_without(history: History, last: Generation, spares: int) -> int:
    """Steps of the last generation with fewer processes than ranks and ``spares``, where no start
    was decided since a rank was lost; 0: too few steps to judge.
    """
    log, since_ns = history.log, last.ready_ns or last.started_ns
    done = _done(history, last, since_ns)
    if len(done) < LOST_STEPS or (done[-1] - since_ns) / 1e9 < LOST_S:
        return 0
    before = [e.time_ns for e in log.of(Kind.FAILURE_DETECTED) if e.time_ns < last.started_ns]
    lost_ns = max(before, default=last.started_ns)
    decided = (a for e in log.of(Kind.DECISION) if e.time_ns >= lost_ns for a in e.data["actions"])
    if any(str(action).startswith("spawn ") for action in decided):
        return 0
    started = {e.data["process"] for e in log.of(Kind.PROCESS_SPAWNED)} - keepers(log).keys()
    gone = {e.data["process"] for e in log.of(Kind.PROCESS_EXITED) if _left_before(e, done[-1])}
    gone |= {
        e.data["process"] for e in log.of(Kind.FAILURE_DETECTED) if e.data["cause"] not in _LIVES_ON
    }
    there = last.world + len(started - gone - {*last.members})
    return len(done) if there < history.info.ranks + spares else 0


def _excused(history: History, last: Generation) -> bool:
    """Whether a missing replacement is excused. A process that died without ever holding a rank, or
    was unfit, is replaced after growing delays; a lost coordinator decides nothing.
    """
    log = history.log
    outside = any(
        e.data["process"] and e.data["rank"] is None for e in log.of(Kind.FAILURE_DETECTED)
    )
    return outside or any(e.time_ns >= last.started_ns for e in log.of(Kind.COORDINATOR_ADOPTED))
