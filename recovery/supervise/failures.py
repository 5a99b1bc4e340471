"""Failures of a job until they are answered, and the samples that it leaves out for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.fallback import SKIP_WINDOW_STEPS
from trainchaos.recovery.policy.strategy import Cause, Failure, Form, StateFrom
from trainchaos.recovery.process.host import Hands
from trainchaos.recovery.supervise.process_table import Process
from trainchaos.recovery.transport.wire import MOST_LEFT_OUT, LeaveOut

Place = tuple[int, int]
"""A rank in a generation of a given size: another process may hold it at the next failure."""

MAX_HISTORY = 1_000  # generations
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """An anomaly, before it is declared a failure. ``process``: None where no process can be
    blamed, as in a collective that failed; ``measured``: of a hang
    (``recovery.detection.hangs.Hang.measured``).
    """

    process: Process | None
    cause: Cause
    detail: str
    measured: Mapping[str, Any] = field(default_factory=dict)


def answer_of(state: StateFrom, cause: str) -> str:
    """How a generation of that state and cause answers its failures; see ``Failure``."""
    return "rollback" if state is StateFrom.CHECKPOINT else cause


class FailureBook:
    """``current``: what the next decision answers; ``history``: what formed generations
    answered.
    """

    def __init__(self, hands: Hands, *, max_attempts: int) -> None:
        self.current: list[Failure] = []
        self.history: list[Failure] = []
        self.suspicion = ""
        self.suspected_s: float | None = None
        self._hands = hands
        self._max_attempts = max_attempts
        self._declared = 0
        self._size = 0  # of the generation that failed
        self.attempts = 0
        self._repeated = 0
        self._places: set[Place | None] = set()
        self._attempts_since = -1
        # place -> step at its last failure, failures in a row at that step
        self._falls: dict[Place, tuple[int, int]] = {}

    def declare(
        self,
        process: Process | None,
        cause: Cause,
        *,
        step: int,
        detail: str,
        generation: int,
        size: int,
        measured: Mapping[str, Any] = NOTHING,
    ) -> Failure:
        """Record a failure, of a process or of an unknown one. It is answered only if it is added
        to ``current`` too. ``size``: of the generation; ``measured``: see ``Symptom``.
        """
        failure = Failure(
            process=process.name if process else "",
            rank=process.rank if process else None,
            cause=cause,
            step=step,
            time_s=self._hands.now_s(),
            generation=generation,
        )
        self._declared, self._size = self._declared + 1, size
        if failure.rank is not None and cause in (Cause.EXIT, Cause.HANG):
            place = self._size, failure.rank
            last, times = self._falls.get(place, (step, 0))
            self._falls[place] = (step, times + 1 if last == step else 1)
        self._hands.record(
            Kind.FAILURE_DETECTED,
            step=step,
            generation=generation,
            failure=self._declared,
            cause=cause.value,
            process=failure.process or None,
            rank=failure.rank,
            detail=detail,
            **measured,
        )
        return failure

    @property
    def states_are_wrong(self) -> bool:
        """Whether a current failure means that a process holds a wrong state: such a job is not
        complete after its last step.
        """
        return any(one.cause in (Cause.DIVERGED, Cause.NONFINITE) for one in self.current)

    def restore(self, answered: Sequence[Failure], current: Sequence[Failure]) -> None:
        """Continue where another supervisor stopped."""
        self.history, self.current = list(answered), list(current)
        self._declared = len(self.history) + len(self.current)

    def suspect(self, why: str) -> None:
        """A collective failed and no process is known to be dead; the cause may be reported in a
        moment.
        """
        self.suspicion, self.suspected_s = why, self._hands.now_s()

    def forget_suspicion(self) -> None:
        """Clear the suspicion: the cause is known, or the generation is past."""
        self.suspected_s = None

    def answered(self, answer: str) -> None:
        """The generation that answers the current failures is ready; ``answer``: see
        ``Failure``.
        """
        self.history.extend(replace(failure, answer=answer) for failure in self.current)
        oldest = self.history[-1].generation - MAX_HISTORY if self.history else 0
        if self.history and self.history[0].generation < oldest:  # too old to be needed again
            self.history = [failure for failure in self.history if failure.generation >= oldest]
        self.current = []
        self.suspected_s = None

    def may_try(self, committed: int, *, world: int) -> bool:
        """Count one more decision; False when too many in a row brought no new committed step:
        ``max_attempts`` because of places that had failed before, or as many because of new ones,
        or half of the ``world``. Single losses of a large job within a long step are no reason to
        give it up.
        """
        if self._attempts_since != committed:
            self._attempts_since, self.attempts, self._repeated, self._places = (
                committed,
                0,
                0,
                set(),
            )
        places: set[Place | None] = {
            (self._size, f.rank) for f in self.current if f.rank is not None
        }
        places = places or {None}
        self.attempts += 1
        self._repeated += places <= self._places
        self._places |= places
        fresh = self.attempts - self._repeated
        return self._repeated < self._max_attempts and fresh <= max(self._max_attempts, world // 2)

    def hopeless(self, high_water: int, *, world: int, max_deaths: int) -> str:
        """Count one more decision. Returns why no further one is made, or "". ``high_water``: the
        highest step ever committed; see ``may_try`` and ``loop``.
        """
        if loop := self.loop(max_deaths):
            return loop
        if self.may_try(high_water, world=world):
            return ""
        return f"{self.attempts - 1} recoveries in a row brought no new step after {high_water}"

    def loop(self, limit: int) -> str:
        """The reason to give up when a rank has died ``limit`` times in a row at one step, in any
        process; else empty. In a world of another size the number means another rank: others have
        moved up.
        """
        for failure in self.current:
            rank = failure.rank
            step, times = (
                self._falls.get((self._size, rank), (0, 0)) if rank is not None else (0, 0)
            )
            if times >= limit:
                return (
                    f"rank {rank} died {times} times in a row at step {step}: another process in"
                    " its place does not help"
                )
        return ""


class ExcludedSamples:
    """Part of the job's state, kept by the supervisor and sent to every process once."""

    def __init__(self, hands: Hands, failures: FailureBook) -> None:
        self._since: dict[int, int] = {}  # sample -> first step without it
        self._order: list[int] = []  # the samples, as they were found
        self._hands = hands
        self._failures = failures
        self._named: dict[str, tuple[int, ...]] = {}

    @property
    def examine(self) -> int:
        """The step at which a further non-finite value is traced to its samples; 0: none."""
        book = self._failures
        failed = [f.step for f in (*book.history, *book.current) if f.cause is Cause.NONFINITE]
        return failed[-1] if failed else 0

    @property
    def lately(self) -> int:
        """How many were excluded in the steps before the current failure."""
        step = self._failures.current[-1].step if self._failures.current else 0
        return sum(1 for since in self._since.values() if since > step - SKIP_WINDOW_STEPS)

    def restore(self, samples: Mapping[int, int]) -> None:
        """Continue where another supervisor stopped; what that one sent to which process is
        unknown.
        """
        self._since, self._order = dict(samples), list(samples)

    def send_missing(self, process: Process) -> int:
        """Send a process the excluded samples that it lacks; returns how many there are in all."""
        while process.exclusions_sent < len(self._order):
            new = self._order[process.exclusions_sent : process.exclusions_sent + MOST_LEFT_OUT]
            since = [self._since[sample] for sample in new]
            self._hands.send(
                process.name, LeaveOut(after=process.exclusions_sent, samples=new, since=since)
            )
            process.exclusions_sent += len(new)
        return len(self._order)

    def note(self, process: str, samples: list[int]) -> None:
        """A rank names the samples to blame."""
        self._named[process] = tuple(samples)

    def with_samples(self, failures: list[Failure]) -> tuple[Failure, ...]:
        """The failures, each with the samples that its process has named."""
        return tuple(replace(f, samples=self._named.get(f.process, ())) for f in failures)

    def take(self, form: Form) -> None:
        """Exclude the samples of a decision, and record them."""
        self._named = {}
        new = [sample for sample in dict.fromkeys(form.skip) if sample not in self._since]
        if new:
            self._since |= dict.fromkeys(new, form.skip_from)
            self._order += new
            # bounds the length of a log line: the shares of many ranks are many samples
            for start in range(0, len(new), MOST_LEFT_OUT):
                some = new[start : start + MOST_LEFT_OUT]
                self._hands.record(
                    Kind.SAMPLES_SKIPPED, step=form.skip_from, samples=some, since=form.skip_from
                )
