"""Whether each claimed recovery is shown: the lost process is out, the others go on with a state
that they were given, and steps follow.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, verdict_of
from trainchaos.harness.judge.record.history import Generation, History
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
