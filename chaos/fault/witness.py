"""Evidence shared by several faults: how a process ended, that it hung, or what its own code saw
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from signal import Signals
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import IN_FLIGHT, Occurrence
from trainchaos.chaos.fault.base import Landed

ENDED = ("exited", "dead", "removed")
"""States in which a machine counts as ended."""
MARKS = "supervisor: progress marks"


def exit_of(
    occurrence: Occurrence, events: Sequence[Event], process: str | None = None
) -> Event | None:
    """The reaped exit of the process hit, or of ``process``. None: it has not ended, or its
    supervisor had asked it to end before the fault acted, so the exit is no evidence.
    """
    name = process if process is not None else occurrence.process
    for event in events:
        if event.kind is Kind.PROCESS_EXITED and event.data["process"] == name:
            asked_ns = event.data.get("asked_ns")
            return None if asked_ns is not None and asked_ns < occurrence.time_ns else event
    return None


def killed(occurrence: Occurrence, events: Sequence[Event], signum: Signals) -> Landed | None:
    """The process hit was reaped with that signal, and its supervisor had not sent it before."""
    ended = exit_of(occurrence, events)
    if ended is None or ended.data["signal"] != signum:
        return None
    return Landed(witness="kernel: wait status", evidence={"signal": ended.data["signal"]})


def effects(
    occurrence: Occurrence, events: Sequence[Event]
) -> Iterator[tuple[Event, Mapping[str, Any]]]:
    """Each report of this occurrence's effect, with the evidence in it."""
    for event in events:
        if (
            event.kind is Kind.FAULT_EFFECT
            and event.data["fault"] == occurrence.fault
            and event.data["occurrence"] == occurrence.number
        ):
            yield event, event.data["evidence"]


def digests_differ(occurrence: Occurrence, events: Sequence[Event], witness: str) -> Landed | None:
    """Digests taken by the rank's own code before and after the act differ."""
    for _, seen in effects(occurrence, events):
        if "after" in seen and seen["before"] != seen["after"]:
            return Landed(witness=witness, evidence=seen)
    return None


def raised_and_exited(
    occurrence: Occurrence, events: Sequence[Event], types: Sequence[str]
) -> Landed | None:
    """The process ended with a nonzero exit code, and the last error it logged has one of these
    types.
    """
    ended = exit_of(occurrence, events)
    raised = [e for e in events if e.kind is Kind.ERROR_RAISED and e.actor == occurrence.process]
    if (
        ended is None
        or not ended.data["exit_code"]
        or not raised
        or raised[-1].data["type"] not in types
    ):
        return None
    evidence = {"exit_code": ended.data["exit_code"], "error": raised[-1].data["type"]}
    return Landed(witness="kernel: wait status", evidence=evidence)


def stood_still(
    occurrence: Occurrence, events: Sequence[Event], at_least_s: float | None
) -> Landed | None:
    """The supervisor declared the process hung because of its progress marks, and NCCL's RAS may
    have seen it missing or behind by then; or, given ``at_least_s``, the process itself reported a
    step that long after the fault acted, or wrote nothing for that long.
    """
    next_line = next((e for e in events if _is_later_line(occurrence, e)), None)
    for event in events:
        if event.time_ns < occurrence.time_ns:
            continue
        hang = event.kind is Kind.FAILURE_DETECTED and event.data["cause"] == "hang"
        if hang and event.data["process"] == occurrence.process:
            seen = {"seen": event.data["detail"]}
            if ras := event.data.get("ras"):
                return Landed(witness=f"NCCL: RAS; {MARKS}", evidence={**seen, "ras": ras})
            return Landed(witness=MARKS, evidence=seen)
        commits = event.kind is Kind.STEP_COMMITTED and event.actor == occurrence.process
        if at_least_s is not None and commits and sum(event.data["seconds"].values()) >= at_least_s:
            seconds = round(sum(event.data["seconds"].values()), 3)
            return Landed(witness="job: phase times", evidence={"step_s": seconds})
        silent_s = (event.time_ns - occurrence.time_ns) / 1e9
        if at_least_s is not None and event is next_line and silent_s >= at_least_s:
            return Landed(witness="job: its own log", evidence={"silent_s": round(silent_s, 3)})
    return None


def _is_later_line(occurrence: Occurrence, event: Event) -> bool:
    """Whether the process wrote this after the fault acted, and not about that."""
    about = event.kind is Kind.FAULT_EFFECT and (event.data["fault"], event.data["occurrence"]) == (
        occurrence.fault,
        occurrence.number,
    )
    return event.actor == occurrence.process and event.time_ns > occurrence.time_ns and not about


def stuck(
    occurrence: Occurrence, events: Sequence[Event], at_least_s: float | None
) -> Landed | None:
    """As ``stood_still``, for faults that block the process until a hang is declared. A process
    that committed more than one further step (the one almost finished at the act) was not blocked
    any more, so a later hang has another cause: if several ranks hang at once, only one is
    declared, and the others continue when that generation is left.
    """
    since = [
        event.time_ns
        for event in events
        if event.kind is Kind.STEP_COMMITTED
        and event.actor == occurrence.process
        and event.time_ns > occurrence.time_ns
    ]
    went_on_ns = sorted(since)[IN_FLIGHT] if len(since) > IN_FLIGHT else float("inf")
    seen = [e for e in events if e.kind is not Kind.FAILURE_DETECTED or e.time_ns < went_on_ns]
    return stood_still(occurrence, seen, at_least_s)


def all_exited(occurrence: Occurrence, events: Sequence[Event], signum: int) -> Landed | None:
    """Every process hit ended by the signal, without having been asked to end before. One that had
    logged an error before it was hit may have ended of that, but not all.
    """
    exits = [exit_of(occurrence, events, process) for process in occurrence.processes]
    by_signal = [one for one in exits if one is not None and one.data["signal"] == signum]
    others = [one for one in exits if one not in by_signal]
    if not by_signal or not all(
        one and _ended_of_itself(occurrence, events, one) for one in others
    ):
        return None
    names = [one.data["process"] for one in by_signal]
    return Landed(witness="kernel: wait status", evidence={"signal": signum, "processes": names})


def _ended_of_itself(occurrence: Occurrence, events: Sequence[Event], ended: Event) -> bool:
    """Whether the process ended with a nonzero exit code after an error that it had logged before
    the fault acted.
    """
    return bool(ended.data["exit_code"]) and any(
        event.kind is Kind.ERROR_RAISED
        and event.actor == ended.data["process"]
        and event.time_ns <= occurrence.time_ns
        for event in events
    )


def machines_ended(occurrence: Occurrence, events: Sequence[Event], signum: int) -> Landed | None:
    """The platform reports all machines hit as ended, and the processes on them exited. Without
    machines: every process hit ended by the signal, without having been asked to end before.
    """
    effects = effects_of(occurrence, events)
    if not any("machines" in effect for effect in effects):
        return all_exited(occurrence, events, signum)
    gone = {event.data["process"] for event in events if event.kind is Kind.PROCESS_EXITED}
    states = next((effect["nodes"] for effect in effects if "nodes" in effect), None)
    if states is None or not set(occurrence.processes) <= gone:
        return None
    if any(seen.get("state") not in ENDED for seen in states.values()):
        return None
    evidence = {"nodes": states, "processes": list(occurrence.processes)}
    return Landed(witness="platform: state of the machine", evidence=evidence)


def effects_of(occurrence: Occurrence, events: Sequence[Event]) -> list[Mapping[str, Any]]:
    """Evidence of all reported effects of an occurrence."""
    return [
        event.data["evidence"]
        for event in events
        if event.kind is Kind.FAULT_EFFECT
        and (event.data["fault"], event.data["occurrence"]) == (occurrence.fault, occurrence.number)
    ]


def said_by_script(
    occurrence: Occurrence, events: Sequence[Event], word: str
) -> Mapping[str, Any] | None:
    """The script's report that it did what its point asked for; None: no report yet."""
    return next(
        (seen for seen in effects_of(occurrence, events) if seen.get("script") == word), None
    )


def hung_by_script(
    occurrence: Occurrence, events: Sequence[Event], word: str, *, busy: bool
) -> Mapping[str, Any] | None:
    """The kernel's account of the thread that should hang, for a while after its script reported
    the hang: it wanted a processor most of that time (``busy``), or little of it. None: no account
    yet, or the opposite of ``busy``.
    """
    if said_by_script(occurrence, events, word) is None:
        return None
    for seen in effects_of(occurrence, events):
        if "watched_s" in seen and ("ran_s" in seen and "queued_s" in seen):
            wanted = seen["ran_s"] + seen["queued_s"] >= seen["watched_s"] / 2
            return {"script": word, **seen} if wanted is busy else None
    return None


def refused_write(occurrence: Occurrence, events: Sequence[Event], errno: str) -> Landed | None:
    """The kernel answered a probe write to the file system hit with this error (such as
    ``ENOSPC``).
    """
    for event in events:
        if event.kind is not Kind.FAULT_EFFECT or event.data["fault"] != occurrence.fault:
            continue
        seen = event.data["evidence"].get("errno")
        if event.data["occurrence"] == occurrence.number and seen == errno:
            return Landed(witness="kernel: write from outside", evidence={"errno": errno})
    return None


def commits_timed(events: Sequence[Event], process: str | None, *phases: str) -> list[Event]:
    """Steps that a process committed, and of which it says how long these phases took: of one that
    was broken off and completed later it may not say that of each.
    """
    return [
        event
        for event in events
        if event.kind is Kind.STEP_COMMITTED
        and event.actor == process
        and event.data["seconds"].keys() >= {*phases}
    ]
