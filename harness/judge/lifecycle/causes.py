"""Whether each failure's stated cause is the one that the log shows, by how and when its process
was reaped.

- ``exit``: the process ended unasked, as the failure says; and every unasked end was declared so.
- ``hang``, ``start-timeout``, ``unfit``: the process still ran, and was then ended for it.
- ``nonfinite``: a rank refused values of that step. ``diverged``: digests of that step differ.
- ``notice``, ``warning``: the process still ran. ``error``: names no process, as the culprit is
  unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.lifecycle.lives import complete_logs, keepers_of, own_lines
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.observed import stride_of
from trainchaos.recovery.policy.strategy import ANNOUNCED

_HOW = re.compile(r"^(signal|exit code) (\d+)")
_ENDED_FOR_IT = ("hang", "start-timeout", "unfit")
_THERE = (*_ENDED_FOR_IT, *ANNOUNCED)


def causes(history: History) -> Iterator[str]:
    """Failures whose cause is impossible, and ends that were not declared."""
    exits = {e.data["process"]: e for e in own_lines(history.log) if e.kind is Kind.PROCESS_EXITED}
    failures = [e for e in own_lines(history.log) if e.kind is Kind.FAILURE_DETECTED]
    for failure in failures:
        yield from _of_an_end(history, failure, exits)
        if not history.info.observed:
            yield from _of_a_rank(history, failure, exits)
    if not history.cut_short and history.outcome in ("completed", "gave-up"):
        yield from _undeclared(history, failures, exits)


def _label(failure: Event) -> str:
    who = failure.data["process"] or "no process"
    return f"failure {failure.data['failure']} ({who}) is said to be {failure.data['cause']}"


def _of_an_end(history: History, failure: Event, exits: Mapping[str, Event]) -> Iterator[str]:
    cause, ended = failure.data["cause"], exits.get(failure.data["process"])
    if ended is None:
        return
    data, before = ended.data, ended.seq < failure.seq
    failed = not data["expected"] and data["exit_code"] != 0
    if cause in _THERE and before and (failed or not history.info.observed):
        yield f"{_label(failure)}, and it had ended before: {_exit_text(ended)}"
    if cause == "exit" and history.info.observed and (not before or not failed):
        yield f"{_label(failure)}, and {'it ended well' if before else 'it ended later'}"
    stated = _HOW.match(str(failure.data["detail"]))
    number = data["signal"] if stated and stated[1] == "signal" else data["exit_code"]
    if cause == "exit" and stated and number != int(stated[2]):
        yield f"{_label(failure)} of {stated[0]}, and its process ended with {_exit_text(ended)}"


def _exit_text(ended: Event) -> str:
    signal, code = ended.data["signal"], ended.data["exit_code"]
    return f"exit code {code}" if signal is None else f"signal {signal}"


def _of_a_rank(history: History, failure: Event, exits: Mapping[str, Event]) -> Iterator[str]:
    """Problems of a failure whose process this log's own coordinator supervised."""
    name, cause, rank = failure.data["process"], failure.data["cause"], failure.data["rank"]
    generation = history.generation(failure.generation)
    members = generation.members if generation is not None else ()
    if name is not None and rank is not None and tuple(members[rank : rank + 1]) != (name,):
        yield (
            f"{_label(failure)} as rank {rank}, which it was not in generation {failure.generation}"
        )
    if name is None and rank is not None:
        yield f"{_label(failure)} of rank {rank}, and of no process"
    ended = exits.get(name)
    later = ended is not None and ended.seq > failure.seq
    if ended is not None and not _taken_over(history, failure, ended):
        if cause == "exit" and ended.data["expected"] and ended.data.get("asked_ns") is not None:
            yield f"{_label(failure)}, and its end was asked for"
        if cause in _ENDED_FOR_IT and later and not ended.data["expected"]:
            yield f"{_label(failure)}, and it ended unasked: {_exit_text(ended)}"
    ready = [
        e
        for e in own_lines(history.log)
        if e.kind is Kind.PROCESS_READY and e.data["process"] == name
    ]
    if cause in ("start-timeout", "unfit"):
        was = any(event.seq < failure.seq for event in ready)
        if was == (cause == "start-timeout"):
            yield f"{_label(failure)}, and it was {'ready' if was else 'not ready'} before that"
    elif cause == "error" and name is not None:
        yield f"{_label(failure)}, and an error must not name a process"
    elif cause == "nonfinite":
        yield from _not_refused(history, failure)
    elif cause == "diverged":
        yield from _not_diverged(history, failure)


def _taken_over(history: History, failure: Event, ended: Event) -> bool:
    """Whether another coordinator took over between the two events: it knows which processes died,
    not which were asked to end.
    """
    first, last = sorted((failure.seq, ended.seq))
    return any(first < e.seq < last for e in history.log.of(Kind.COORDINATOR_ADOPTED))


def _logs_complete(history: History, failure: Event) -> bool:
    """Whether the logs of all members of the failure's generation are complete."""
    generation = history.generation(failure.generation)
    return generation is not None and set(generation.members) <= complete_logs(history.log)


def _refused(history: History, failure: Event) -> list[Event]:
    """Refusals by ranks of values in a failure's step, or of the state after it."""
    about = (failure.generation, failure.step)
    return [e for e in history.log.of(Kind.NONFINITE_CAUGHT) if (e.generation, e.step) == about]


def _not_refused(history: History, failure: Event) -> Iterator[str]:
    if not _refused(history, failure) and _logs_complete(history, failure):
        yield f"{_label(failure)}, and no rank refused any value of step {failure.step}"


def _not_diverged(history: History, failure: Event) -> Iterator[str]:
    # A state is refused after its step was committed, and may differ from others as well.
    if any(refusal.data.get("what") != "state" for refusal in _refused(history, failure)):
        yield f"{_label(failure)}, and step {failure.step} was refused, and never committed"
    generation = history.generation(failure.generation)
    if generation is None or failure.step == generation.resume_step:
        return  # shown by the states that the members joined with
    found = {
        e.actor: (e.data["rank"] % history.shards, e.data["parameters"], e.data["optimizer"])
        for e in history.log.of(Kind.STATE_DIGEST)
        if (e.generation, e.step) == (failure.generation, failure.step)
    }
    alike = len(set(found.values())) == len({each[0] for each in found.values()})
    if found.keys() == set(generation.members) and alike:
        yield f"{_label(failure)}, and all digests of step {failure.step} are the same"


def _undeclared(
    history: History, failures: list[Event], exits: Mapping[str, Event]
) -> Iterator[str]:
    """Ends that were not asked for, and that no failure declares."""
    if history.info.observed:
        yield from _undeclared_by_a_command(history, failures, exits)
        return
    declared = {failure.data["process"] for failure in failures if failure.data["cause"] == "exit"}
    for name, ended in exits.items():
        if not ended.data["expected"] and name not in declared | keepers_of(history.log):
            how = _exit_text(ended)
            yield f"{name} ended unasked ({how}), and no failure is said to be its exit"


def _undeclared_by_a_command(
    history: History, failures: list[Event], exits: Mapping[str, Event]
) -> Iterator[str]:
    """The first rank of a generation that ends badly is a failure, if any step was reported before
    and the last was not yet, as far as the spacing of reports shows.
    """
    reports, stride = list(history.log.of(Kind.STEP_REPORTED)), stride_of(history)
    declared = {failure.generation for failure in failures}
    for name, ended in exits.items():
        generation = history.generation(ended.generation)
        if ended.data["expected"] or ended.data["exit_code"] == 0 or generation is None:
            continue
        before = [e for e in reports if e.seq < ended.seq]
        done = any((e.step or 0) + stride > history.info.steps for e in before)
        if name in generation.members and before and not done and generation.number not in declared:
            yield f"{name} ended with {_exit_text(ended)}, and no failure was declared"
