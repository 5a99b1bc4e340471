"""Whether each claimed recovery is shown (the lost process is out, the others go on with a state
that they were given, and steps follow), and how the arm ended: every process's exit status, and the
job's final size.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Collection, Iterator, Mapping

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, verdict_of
from trainchaos.harness.judge.record.history import NS, Generation, History
from trainchaos.harness.judge.record.kept_in_memory import keepers
from trainchaos.harness.judge.record.nodes import silenced
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.policy.strategy import ANNOUNCED

PERMANENT_LOSSES = ("exit", "hang", "start-timeout", "unfit")
"""Causes after which a process never takes a rank again."""
RESTARTS = "checkpoint-restart"
_NEW_ONES = (Kind.PROCESS_SPAWNED, Kind.COMMAND_STARTED, Kind.STEP_REPORTED)


def recovery_shown(evidence: Evidence) -> Finding:
    """Each failure of a member is followed by a generation without the lost process, whose new
    members got the state from a peer or a checkpoint; all restart from a checkpoint where the
    strategy says so; and steps follow. For a command, something was started or done after it.
    """
    history = evidence.history
    observed = history.info.observed
    problems: list[str] = []
    lacking: list[str] = []
    failures = [*_of_members(history)]
    count = 0
    for failure in failures:
        later = (g for g in history.generations if g.number > failure.generation)
        answer = next((g for g in later if observed or g.ready_ns is not None), None)
        count += answer is not None
        if answer is None:
            (lacking if observed else problems).extend(_unanswered(evidence, failure))
        elif not observed:
            problems += _of_a_job(history, failure, answer)
    shown = f"{count} of {len(failures)} failures answered, as shown"
    return verdict_of(
        list(dict.fromkeys(problems)), shown if failures else "no member failed", lacking
    )


def _of_members(history: History) -> Iterator[Event]:
    """Failures that the job has to answer. A member that was only notified of its coming end, or
    whose place is about to fail, is still there.
    """
    for failure in history.log.of(Kind.FAILURE_DETECTED):
        generation = history.generation(failure.generation)
        members = generation.members if generation else ()
        if failure.data["cause"] not in ANNOUNCED and failure.data["process"] in (None, *members):
            yield failure


def _label(failure: Event) -> str:
    data = failure.data
    return f"failure {data['failure']} ({data['process'] or 'no process'}, {data['cause']})"


def _unanswered(evidence: Evidence, failure: Event) -> Iterator[str]:
    """A failure without an answer in a completed job. Excused: a new coordinator that found the job
    done, and a job whose last step was made before the failure.
    """
    history, at = evidence.history, failure.time_ns
    last = history.lineage.get(history.info.steps)
    if last is not None and last.committed_ns is not None and last.committed_ns < at:
        return
    adopted = history.log.of(Kind.COORDINATOR_ADOPTED)
    if history.outcome != "completed" or any(e.time_ns > at for e in adopted):
        return
    if not history.info.observed:
        yield f"{_label(failure)} was answered by no generation, and the job is said to be done"
        return
    rows = zip(evidence.measures.episodes, evidence.measures.incidents, strict=False)
    claimed = any(failure in e.failures and one.outcome == "recovered" for e, one in rows)
    if claimed and not any(event.time_ns > at for event in history.log.of(*_NEW_ONES)):
        yield f"{_label(failure)} is said to be recovered, and nothing was started or done after it"


def _of_a_job(history: History, failure: Event, answer: Generation) -> Iterator[str]:
    number, resume = answer.number, answer.resume_step or 0
    if failure.data["cause"] in PERMANENT_LOSSES and failure.data["process"] in answer.members:
        yield f"{_label(failure)} is a member of generation {number}, which answers it"
    if history.info.strategy == RESTARTS and answer.state != "checkpoint":
        yield (
            f"generation {number} answers {_label(failure)} with state {answer.state}, and all were"
            " to restart"
        )
    steps = any(run.generation >= number for run in history.runs)
    if history.outcome == "completed" and not steps and resume < history.info.steps:
        yield f"generation {number} answers {_label(failure)}, and made no step from {resume} on"
    yield from _new_members(history, answer)


def _new_members(history: History, answer: Generation) -> Iterator[str]:
    """New members that were not given the state. Of those that ended with a lost node, lines may be
    lost.
    """
    log, number = history.log, answer.number
    earlier = {m for g in history.generations if g.number < number for m in g.members}
    origins = {
        e.actor: str(e.data["origin"]) for e in log.of(Kind.STATE_READY) if e.generation == number
    }
    followed = {event.actor for event in log.of(Kind.SPARE_SYNCED)}
    for name in answer.members:
        if name in earlier or name in silenced(log):
            continue
        origin, new = origins.get(name, ""), f"{name} is new in generation {number}"
        if origin == "live" and name not in followed:
            yield (
                f"{new}, holds its state as one that has followed the job, and never began to"
                " follow"
            )
        if origin == "kept" or (origin == "initial" and answer.resume_step):
            yield f"{new}, and was not given the state of step {answer.resume_step}"


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
    history, log = evidence.history, evidence.log
    if history.info.observed:
        return _of_a_command(evidence)
    apart, episodes = keepers(log), evidence.measures.episodes
    ends = {e.data["process"]: e for e in log.of(Kind.PROCESS_EXITED)}
    hit = {name for one in episodes for name in (*one.processes, *one.replica)}
    hit |= {event.data["process"] for event in log.of(Kind.FAILURE_DETECTED)}
    storage = any(episode.injected and not episode.processes for episode in episodes)
    problems: list[str] = []
    for name in [name for name in ends if name not in apart and name not in hit]:
        data, how = ends[name].data, _exit_text(ends[name])
        odd = data["exit_code"] not in (None, 0) or data["signal"] not in (None, signal.SIGKILL)
        if not data["expected"] and data.get("asked_ns") is None and not history.cut_short:
            problems.append(
                f"{name} ended with {how}; no fault explains it, and it was not declared failed"
            )
        if odd and data["expected"] and not storage and history.outcome == "completed":
            problems.append(f"{name} was asked to end, and ended with {how}")
    ends = {name: end for name, end in ends.items() if name not in apart}
    problems += [*_errors(evidence, ends, hit), *too_small(evidence)]
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
    how = "its command was never seen to end"
    if ended:
        how = f"its command ended with {_exit_text(ended[-1])}"
    problems = []
    if evidence.history.outcome == "completed":
        if not ended or ended[-1].data["exit_code"] != 0 or ended[-1].data["signal"] is not None:
            problems.append(f"the job is said to be completed, and {how}")
        elif ended[-1].data["asked"]:
            problems.append("the job is said to be completed, and its command was asked to end")
    failures = evidence.log.of(Kind.FAILURE_DETECTED)
    noticed = [e.time_ns for e in failures if e.data["cause"] == "notice"]
    begun = [e.time_ns for e in evidence.log.of(Kind.COMMAND_STARTED)]
    for event in ended[:-1]:
        since = max((ns for ns in begun if ns < event.time_ns), default=0)
        preempted = any(since < ns < event.time_ns for ns in noticed)
        if event.data["exit_code"] == 0 and not preempted:
            problems.append(
                f"attempt {event.data['attempt']} of the command ended well, and was started again"
            )
    return verdict_of(problems, f"{how}; what else it did is not known")


def _exit_text(event: Event) -> str:
    code, signum = event.data["exit_code"], event.data["signal"]
    if signum is None:
        return f"exit code {code}"
    known = signum in {each.value for each in signal.Signals}
    return signal.Signals(signum).name if known else f"signal {signum}"


def _errors(evidence: Evidence, ends: Mapping[str, Event], hit: set[str]) -> Iterator[str]:
    """An error is the last event of a process and ends it, and is explained by a fault or by the
    end of the job. ``hit``: who was hit, or was declared failed.
    """
    history = evidence.history
    if evidence.log.first(Kind.ERROR_RAISED) is None:
        return
    for name, log in evidence.log.actors.items():
        for error, following in itertools.zip_longest(log.events, log.events[1:]):
            if error.kind is not Kind.ERROR_RAISED:
                continue
            what, end = f"{name} raised {error.data['type']}", ends.get(name)
            asked_ns = end.data.get("asked_ns") if end is not None else None
            asked = asked_ns is not None and asked_ns <= error.time_ns
            struck = end is not None and name in hit
            if following is not None:
                yield f"{what}, and went on"
            elif end is not None and end.data["exit_code"] == 0:
                yield f"{what}, and ended with exit code 0"
            elif not (asked or history.cut_short or history.unfinished or struck):
                yield f"{what}, and no fault explains it"


def too_small(evidence: Evidence) -> Iterator[str]:
    """In a job that ended with too few ranks: processes that were long ready to fill a replica, and
    places for which no process was started; with enough, spares that took ranks and were not
    replaced.

    A missing replacement is excused: a process that died without ever holding a rank, or was unfit,
    is replaced after growing delays; a lost coordinator decides nothing.
    """
    history, spec, log = evidence.history, evidence.cell.scenario.recovery, evidence.log
    if history.outcome != "completed" or not history.worked:
        return
    last, spares = history.worked[-1], history.info.spares
    excused = any(
        e.data["process"] and e.data["rank"] is None for e in log.of(Kind.FAILURE_DETECTED)
    ) or any(e.time_ns >= last.started_ns for e in log.of(Kind.COORDINATOR_ADOPTED))
    if last.world >= history.info.ranks:
        replenishes = bool(spares) and spec.params.get("replenish", True) is not False
        steps = _steps_without(history, last, spares) if replenishes and not excused else 0
        if steps:
            yield (
                f"spares took ranks, and no replacements were started in the {steps} steps that"
                " followed"
            )
        return
    ended = f"the job ended with {last.world} of {history.info.ranks} ranks"
    idle = _idle(history, last)
    if fills_a_replica(history, idle):
        steps = min(idle.values())
        yield f"{ended}, though {', '.join(sorted(idle))} had been ready for {steps} steps"
    wanted = _REPLACES_LOST.get(spec.strategy)
    if wanted is None or spec.params.get(wanted, True) is False or excused:
        return
    if steps := _steps_without(history, last, 0):
        yield (
            f"{ended}, and no replacement was started for those lost in the {steps} steps that"
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
    others = {*last.members, *(e.data["process"] for e in log.of(Kind.FAILURE_DETECTED))}
    found = {}
    for event in log.of(Kind.PROCESS_READY):
        name = event.data["process"]
        since_ns = max(event.time_ns, last.ready_ns or last.started_ns)
        after = _done(history, last, since_ns)
        if name in others or len(after) < IDLE_STEPS or (after[-1] - since_ns) / NS < IDLE_S:
            continue
        if name not in gone or not _left_before(gone[name], after[-1]):
            found[name] = len(after)
    return found


def _left_before(exited: Event, time_ns: int) -> bool:
    """Whether a process had ended, or had been asked to end, before ``time_ns``."""
    return min(exited.data.get("asked_ns") or exited.time_ns, exited.time_ns) < time_ns


def fills_a_replica(history: History, idle: Collection[str]) -> bool:
    """Whether the idle processes can fill a replica: one that held a shard, or follows one as a
    spare, only takes that shard, one that never did takes any.
    """
    placed = history.log.of(Kind.SPARE_PLACED)
    held = {str(event.data["process"]): int(event.data["shard"]) for event in placed}
    for generation in history.generations:
        held |= {name: generation.shard_of(rank) for rank, name in enumerate(generation.members)}
    fresh = sum(name not in held for name in idle)
    parts = {held[name] for name in idle if name in held}
    return bool(idle) and fresh + len(parts) >= history.shards


def _steps_without(history: History, last: Generation, spares: int) -> int:
    """Steps of the last generation with fewer processes than ranks and ``spares``, where no start
    was decided since a rank was lost; 0: too few steps to judge.
    """
    log, since_ns = history.log, last.ready_ns or last.started_ns
    failures = [*log.of(Kind.FAILURE_DETECTED)]
    done = _done(history, last, since_ns)
    if len(done) < LOST_STEPS or (done[-1] - since_ns) / NS < LOST_S:
        return 0
    before = [e.time_ns for e in failures if e.time_ns < last.started_ns]
    lost_ns = max(before, default=last.started_ns)
    decided = (a for e in log.of(Kind.DECISION) if e.time_ns >= lost_ns for a in e.data["actions"])
    if any(str(action).startswith("spawn ") for action in decided):
        return 0
    started = {e.data["process"] for e in log.of(Kind.PROCESS_SPAWNED)} - keepers(log).keys()
    gone = {e.data["process"] for e in log.of(Kind.PROCESS_EXITED) if _left_before(e, done[-1])}
    gone |= {e.data["process"] for e in failures if e.data["cause"] not in _LIVES_ON}
    there = last.world + len(started - gone - {*last.members})
    return len(done) if there < history.info.ranks + spares else 0
