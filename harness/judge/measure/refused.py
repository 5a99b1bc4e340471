"""States that a fault made non-finite and that were refused: their digests differ for a known,
answered reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import episodes_of
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.split import holders

Moment = tuple[int, int]
"""(generation, step)."""


@dataclass(frozen=True, kw_only=True)
class RefusedState:
    """A state of ``process`` with a planted non-finite value, from the step of the injection to the
    step of the failure that named the process. ``held``: the generations between, in which the
    process had not yet taken another state.
    """

    process: str
    since: Moment
    until: Moment
    held: frozenset[int]

    def has(self, digest: Event) -> bool:
        """Whether a digest is of this state."""
        at = (digest.generation, digest.step or 0)
        within = self.since <= at <= self.until and digest.generation in self.held
        return within and digest.actor == self.process


def refused_states(history: History) -> tuple[RefusedState, ...]:
    """All refused states. A rank counts only if it reported holding such a value itself, and only
    until it was first named for a non-finite value: later a sample may be the cause.
    """
    failures: dict[str, list[Event]] = {}
    for failure in history.log.of(Kind.FAILURE_DETECTED):
        if failure.data["cause"] == "nonfinite" and failure.data["process"] is not None:
            failures.setdefault(failure.data["process"], []).append(failure)
    if not failures:
        return ()
    planted = [
        one
        for one in episodes_of(history)
        if one.changed_state and not all(map(math.isfinite, one.planted))
    ]
    return tuple(
        found
        for episode in planted
        for process, named in failures.items()
        if (found := _refused(history, episode, process, named)) is not None
    )


def answered(history: History, failure: Event) -> bool:
    """Whether the job did not complete, or completed in a later generation than that of the
    failure.
    """
    if history.outcome != "completed":
        return True
    return any(one.number > failure.generation for one in history.worked)


def refused_at(states: Sequence[RefusedState], generation: int, step: int) -> int:
    """How many processes held a refused state after this step."""
    return len(
        {
            one.process
            for one in states
            if one.since <= (generation, step) <= one.until and generation in one.held
        }
    )


def _refused(
    history: History, episode: Episode, process: str, named: Sequence[Event]
) -> RefusedState | None:
    injected = episode.injected
    failure = next((one for one in named if injected and injected.time_ns <= one.time_ns), None)
    if injected is None or failure is None or not answered(history, failure):
        return None
    first, last = injected.generation, failure.generation
    held = frozenset(
        number
        for number in range(first, last + 1)
        if process in holders(history, episode.processes, first, number)
    )
    if last not in held:
        return None
    until = (last, failure.step or 0)
    return RefusedState(process=process, since=(first, injected.step or 0), until=until, held=held)
