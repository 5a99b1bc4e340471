"""Whether each claimed recovery is shown: it was decided on, the lost process is out, and the other
members took part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some, unknown
from trainchaos.harness.judge.lifecycle.lives import complete_logs, own_lines
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.policy.strategy import ANNOUNCED

PERMANENT_LOSSES = ("exit", "hang", "start-timeout", "unfit")
"""Causes after which a process never takes a rank again."""
RESTARTS = "checkpoint-restart"
_HELD_BEFORE = ("initial", "kept")
_NEW_ONES = (Kind.PROCESS_SPAWNED, Kind.COMMAND_STARTED, Kind.STEP_REPORTED)


def recovery_shown(evidence: Evidence) -> Finding:
    """Each failure of a member is followed by a generation that was decided on, without the lost
    process.

    Members that stay left the failed generation; new members got the state from a peer or a
    checkpoint; all restart from a checkpoint where the strategy says so; and steps follow. For a
    command, the rank is restarted, or the job goes on without it.
    """
    history, log = evidence.history, evidence.log
    answered = [(failure, _answer(history, failure)) for failure in _of_members(history)]
    problems: list[str] = []
    lacking: list[str] = []
    for failure, answer in answered:
        if answer is None:
            (lacking if history.info.observed else problems).extend(_unanswered(evidence, failure))
        elif history.info.observed:
            problems += _of_a_command(history, failure, answer)
        else:
            problems += _of_a_job(evidence, failure, answer)
    problems = list(dict.fromkeys(problems))
    if problems and not log.problems:
        return failed(some(problems))
    if problems or lacking:
        return unknown(some([*problems, *lacking, *log.problems[:1]]))
    count = sum(answer is not None for _, answer in answered)
    return passed(
        f"{count} of {len(answered)} failures answered, as shown"
        if answered
        else "no member failed"
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


def _answer(history: History, failure: Event) -> Generation | None:
    """The first generation that trained after a failure."""
    later = (g for g in history.generations if g.number > failure.generation)
    if history.info.observed:
        return next(later, None)
    return next((g for g in later if g.ready_ns is not None), None)


def _label(failure: Event) -> str:
    return (
        f"failure {failure.data['failure']} ({failure.data['process'] or 'no process'},"
        f" {failure.data['cause']})"
    )


def _unanswered(evidence: Evidence, failure: Event) -> Iterator[str]:
    """A failure without an answer in a completed job. Excused: a new coordinator that found the job
    done, and a job whose last step was made before the failure.
    """
    history = evidence.history
    last = history.lineage.get(history.info.steps)
    if last is not None and last.committed_ns is not None and last.committed_ns < failure.time_ns:
        return
    later = [e for e in own_lines(history.log) if e.seq > failure.seq]
    if history.outcome != "completed" or any(e.kind is Kind.COORDINATOR_ADOPTED for e in later):
        return
    if not history.info.observed:
        yield f"{_label(failure)} was answered by no generation, and the job is said to be done"
        return
    claimed = any(
        failure in (episode.failure, *episode.others) and incident.outcome == "recovered"
        for episode, incident in zip(
            evidence.measures.episodes, evidence.measures.incidents, strict=False
        )
    )
    if claimed and not any(event.kind in _NEW_ONES for event in later):
        yield f"{_label(failure)} is said to be recovered, and nothing was started or done after it"


def _of_a_command(history: History, failure: Event, answer: Generation) -> Iterator[str]:
    """Contradictions between a failure and the generation that answers it, as seen from outside."""
    name, number = failure.data["process"], answer.number
    before = history.generation(failure.generation)
    old = set(before.members) if before else set()
    own = own_lines(history.log)
    starts = {e.generation: e.seq for e in own if e.kind is Kind.GENERATION_STARTED}
    # A rank's replacement may be found before its end is: take all since the failed generation.
    between = [e for e in own if starts.get(failure.generation, -1) < e.seq < starts[number]]
    if failure.data["cause"] == "exit" and name in answer.members:
        yield f"{_label(failure)} ended, and is a member of generation {number}, which followed"
    if answer.cause == "restart":
        fresh = {e.data["process"] for e in between if e.kind is Kind.PROCESS_SPAWNED}
        if not fresh & set(answer.members):
            yield (
                f"generation {number} is a restart after {_label(failure)}, and no member was"
                " started for it"
            )
    elif answer.cause in ("shrunk", "resumed") and not set(answer.members) <= old:
        yield f"generation {number} goes on after {_label(failure)} with others than were left"
    if answer.cause == "shrunk" and len(answer.members) >= len(old):
        yield (
            f"generation {number} is said to have shrunk after {_label(failure)}, from {len(old)}"
            " members to as many"
        )


def _of_a_job(evidence: Evidence, failure: Event, answer: Generation) -> Iterator[str]:
    history, log, number = evidence.history, evidence.log, answer.number
    name, cause = failure.data["process"], failure.data["cause"]
    own = own_lines(log)
    begun = next(e.seq for e in own if e.kind is Kind.GENERATION_STARTED and e.generation == number)
    if not any(_answers(e, failure) for e in _decided(own, failure) if e.seq < begun):
        yield f"generation {number} answers {_label(failure)}, and was not decided on"
    if cause in PERMANENT_LOSSES and name in answer.members:
        yield f"{_label(failure)} is a member of generation {number}, which answers it"
    if history.info.strategy == RESTARTS and answer.state != "checkpoint":
        yield (
            f"generation {number} answers {_label(failure)} with state {answer.state}, and all were"
            " to restart"
        )
    yield from _went_on(history, failure, answer)
    yield from _members(history, failure, answer)


def _decided(own: Iterable[Event], failure: Event) -> Iterator[Event]:
    """Decisions since the first failure of its generation, or since a new coordinator broke it."""
    failed = False
    for event in own:
        failed = failed or (
            event.kind in (Kind.FAILURE_DETECTED, Kind.COORDINATOR_ADOPTED)
            and event.generation == failure.generation
        )
        if failed and event.kind is Kind.DECISION:
            yield event


def _answers(decision: Event, failure: Event) -> bool:
    """Whether a decision was made after a failure, or before it and formed a generation without
    that process, so that its end changes nothing.
    """
    if decision.seq > failure.seq:
        return True
    name = failure.data["process"]
    forms = [
        action.split(" with state ")[0].split()
        for action in decision.data["actions"]
        if action[:5] == "form "
    ]
    return name is not None and bool(forms) and all(name not in members for members in forms)


def _went_on(history: History, failure: Event, answer: Generation) -> Iterator[str]:
    """A completed job made steps after a recovery, if any were left to make."""
    resume = answer.resume_step or 0
    steps = any(run.generation >= answer.number for run in history.runs)
    if history.outcome == "completed" and not steps and resume < history.info.steps:
        yield (
            f"generation {answer.number} answers {_label(failure)}, and made no step from"
            f" {resume} on"
        )


def _members(history: History, failure: Event, answer: Generation) -> Iterator[str]:
    """A member that stays has left the failed generation; a new member was given the state."""
    log, number = history.log, answer.number
    earlier = {m for g in history.generations if g.number < number for m in g.members}
    whole = complete_logs(log)
    left = {e.actor for e in log.of(Kind.PARKED) if e.generation == failure.generation}
    for event in log.of(Kind.SURVIVORS_PARKED):
        left |= set(event.data["processes"]) if event.generation == failure.generation else set()
    joined = {e.actor for e in log.of(Kind.GROUP_FORMED) if e.generation == failure.generation}
    origins = {
        e.actor: str(e.data["origin"]) for e in log.of(Kind.STATE_READY) if e.generation == number
    }
    followed = {event.actor for event in log.of(Kind.SPARE_SYNCED)}
    for name in answer.members:
        if name not in whole:
            continue
        if name in joined - left:
            yield (
                f"{name} is a member of generation {number}, and never left generation"
                f" {failure.generation}"
            )
        fresh, origin = name not in earlier, origins.get(name, "")
        if fresh and origin == "live" and name not in followed:
            yield (
                f"{name} is new in generation {number}, holds its state as one that has followed"
                " the job, and never began to follow"
            )
        if fresh and origin in _HELD_BEFORE and (origin == "kept" or answer.resume_step):
            yield (
                f"{name} is new in generation {number}, and was not given the state of step"
                f" {answer.resume_step}"
            )
