"""The end of a command that lost a rank for good: part of the incident that the lost rank began.

A command that waits for all its processes fails once the survivors are through, long after one of
them died: their steps look like a recovery until then.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.history import History


def end_that_follows(history: History, failure: Event) -> Event | None:
    """The failure of the command itself that follows from the failure of one of its processes; None
    if there is none. It follows if the command was not started again in between and ended with
    fewer processes than it had at the first failure.
    """
    until = _started_again_ns(history, failure)
    for event in history.log.of(Kind.FAILURE_DETECTED):
        if event.data["process"] is None and event.data["cause"] == "exit":
            in_time = failure.time_ns < event.time_ns < (until or event.time_ns + 1)
            if in_time and _lost_for_good(history, failure, event.generation):
                return event
    return None


def ended_ns(history: History, failure: Event) -> int | None:
    """When a command failed because of the failure of one of its processes, started again or not,
    ns; None if it did not.
    """
    end = end_that_follows(history, failure)
    if end is not None:
        return end.time_ns
    last = history.generations[-1].number if history.generations else 0
    gave_up = history.outcome == "gave-up" and _started_again_ns(history, failure) is None
    return history.end_ns if gave_up and _lost_for_good(history, failure, last) else None


def _started_again_ns(history: History, failure: Event) -> int | None:
    starts = (event.time_ns for event in history.log.of(Kind.COMMAND_STARTED))
    return min((ns for ns in starts if ns > failure.time_ns), default=None)


def _lost_for_good(history: History, failure: Event, generation: int) -> bool:
    """Whether a command had fewer processes in a later generation than when one of them failed."""
    if not history.info.observed or failure.data["process"] is None:
        return False
    before, after = history.generation(failure.generation), history.generation(generation)
    return before is not None and after is not None and after.world < before.world


def take_ends(history: History, explained: Iterable[list[Event]], left: list[Event]) -> list[Event]:
    """Add each end of a command to the list of failures that holds the one it follows from.

    ``explained``: for each episode the failures that it explains; ``left``: failures that none
    explains, of which the remaining ones are returned.
    """
    for failures in explained:
        for failure in tuple(failures):
            end = end_that_follows(history, failure)
            if end in left and end not in failures:
                failures.append(end)
        left = [failure for failure in left if failure not in failures]
    return left
