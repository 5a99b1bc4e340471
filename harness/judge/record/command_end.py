"""What follows from the loss of a rank and is part of the incident that it began: the end of the
survivors, and of the command.

A command that waits for all its processes fails once the survivors are through, long after one of
them died. A launcher may end survivors only some seconds after one rank died. In both cases their
steps look like a recovery until then.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.history import History


def follows(history: History, failure: Event, event: Event) -> bool:
    """Whether a failure of a command, or of one of its processes, follows from an earlier failure
    of a process.
    """
    late = event.data["cause"] == "exit" and event.time_ns > failure.time_ns
    if not (late and history.info.observed):
        return False
    if event.data["process"] is None:
        again = started_again_ns(history, failure)
        in_time = again is None or event.time_ns < again
        return in_time and _lost_for_good(history, failure, event.generation)
    return _of_survivors(history, failure, event)


def ended_ns(history: History, failure: Event) -> int | None:
    """When a command, or its survivors, failed last because of the failure of one of its processes,
    started again or not, ns; None if they did not.
    """
    ends = [
        e.time_ns for e in history.log.of(Kind.FAILURE_DETECTED) if follows(history, failure, e)
    ]
    if ends:
        return max(ends)
    last = history.generations[-1].number if history.generations else 0
    gave_up = history.outcome == "gave-up" and started_again_ns(history, failure) is None
    return history.end_ns if gave_up and _lost_for_good(history, failure, last) else None


def _of_survivors(history: History, failure: Event, event: Event) -> bool:
    """Whether a process failed that was left after another one was lost: no process was started in
    between, and no fault injected.
    """
    before = history.generation(failure.generation)
    since = [g for g in history.generations if failure.generation < g.number <= event.generation]
    if before is None or not since or since[-1].world >= before.world:
        return False
    if not all(set(before.members).issuperset(g.members) for g in since):
        return False
    return not any(
        failure.time_ns < fault.time_ns <= event.time_ns
        for fault in history.log.of(Kind.FAULT_INJECTED)
    )


def started_again_ns(history: History, failure: Event) -> int | None:
    """When the command was next started after a failure; None: it was not."""
    starts = (event.time_ns for event in history.log.of(Kind.COMMAND_STARTED))
    return min((ns for ns in starts if ns > failure.time_ns), default=None)


def _lost_for_good(history: History, failure: Event, generation: int) -> bool:
    """Whether a command had fewer processes in a later generation than when one of them failed."""
    if not history.info.observed or failure.data["process"] is None:
        return False
    before, after = history.generation(failure.generation), history.generation(generation)
    return before is not None and after is not None and after.world < before.world


def take_ends(history: History, explained: Iterable[list[Event]], left: list[Event]) -> list[Event]:
    """Add what follows from a failure to the list of failures that holds that one.

    ``explained``: for each episode the failures that it explains; ``left``: failures that none
    explains, of which the remaining ones are returned.
    """
    for failures in explained:
        first = tuple(failures)
        failures += [end for end in left if any(follows(history, one, end) for one in first)]
        left = [failure for failure in left if failure not in failures]
    return left
