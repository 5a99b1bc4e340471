"""How the arm ended: every process's exit status, and the job's final size."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.checkers.job.refilled import too_small
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER


def ending(evidence: Evidence) -> Finding:
    """Every process ended as requested or as a fault explains, and no survivor raised an error. A
    job that ended too small left no spare waiting or unstarted that could have filled it. For a
    command: a completed job's last attempt ended well.
    """
    history = evidence.history
    if history.info.observed:
        return _of_a_command(evidence)
    ends = _ends(evidence)
    sure = [*_exits(evidence, ends), *_errors(evidence, ends), *too_small(evidence)]
    if sure:
        return failed(some(sure))
    world = history.worked[-1].world if history.worked else 0
    size = (
        f"{world} of {history.info.ranks} ranks at the end" if world else "no generation was formed"
    )
    return passed(f"{len(ends)} processes ended as asked or explained; {size}")


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
    return failed(some(problems)) if problems else passed(f"{how}; what else it did is not known")


@dataclass(frozen=True, kw_only=True)
class _End:
    """One process's exit. ``asked_ns``: when it was first asked to end; None: never, or not known.
    ``hit``: a fault hit it, or it was declared failed.
    """

    event: Event
    asked_ns: int | None
    hit: bool

    @property
    def name(self) -> str:
        return str(self.event.data["process"])


def _ends(evidence: Evidence) -> dict[str, _End]:
    log = evidence.log
    hit = {
        name
        for episode in evidence.measures.episodes
        for name in (*episode.processes, *episode.replica)
    }
    hit |= {event.data["process"] for event in log.of(Kind.FAILURE_DETECTED)}
    keepers = {
        e.data["process"] for e in log.of(Kind.PROCESS_SPAWNED) if e.data.get("role") == KEEPER
    }
    return {
        event.data["process"]: _End(
            event=event, asked_ns=event.data.get("asked_ns"), hit=event.data["process"] in hit
        )
        for event in log.of(Kind.PROCESS_EXITED)
        if event.data["process"] not in keepers
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
