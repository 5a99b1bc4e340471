"""What a supervisor knows about failures: those being answered, earlier ones, a suspicion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chaos.events import Kind
from recovery.crew import Process
from recovery.strategy import Cause, Failure, StateFrom
from recovery.supervision import Hands


def answer_of(state: StateFrom, cause: str) -> str:
    """What a generation of that state and cause is to the failures that it answers; see ``Failure``."""
    return "rollback" if state is StateFrom.CHECKPOINT else cause


class FailureBook:
    """``current``: what the next decision answers; ``history``: what formed generations answered."""

    def __init__(self, hands: Hands, *, max_attempts: int) -> None:
        self.current: list[Failure] = []
        self.history: list[Failure] = []
        self.suspicion = ""
        self.suspected_s: float | None = None
        self._hands = hands
        self._max_attempts = max_attempts
        self._declared = 0
        self._attempts = 0
        self._attempts_since = -1
        self._falls: dict[int, tuple[int, int]] = {}  # rank -> step it died at last, how often in a row

    def declare(
        self, process: Process | None, cause: Cause, *, step: int, detail: str, generation: int
    ) -> Failure:
        """Write a failure down, a process's or nobody's. It is answered only if added to ``current`` too."""
        failure = Failure(
            process=process.name if process else "",
            rank=process.rank if process else None,
            cause=cause,
            step=step,
            time_s=self._hands.now_s(),
            generation=generation,
        )
        self._declared += 1
        if failure.rank is not None and cause in (Cause.EXIT, Cause.HANG):
            last, times = self._falls.get(failure.rank, (step, 0))
            self._falls[failure.rank] = (step, times + 1 if last == step else 1)
        self._hands.record(
            Kind.FAILURE_DETECTED,
            step=step,
            generation=generation,
            failure=self._declared,
            cause=cause.value,
            process=failure.process or None,
            rank=failure.rank,
            detail=detail,
        )
        return failure

    def restore(self, answered: Sequence[Failure], current: Sequence[Failure]) -> None:
        """Go on where another supervisor ended."""
        self.history, self.current = list(answered), list(current)
        self._declared = len(self.history) + len(self.current)

    def suspect(self, why: str) -> None:
        """A collective failed and nobody is known to be dead; the cause may be reported in a moment."""
        self.suspicion, self.suspected_s = why, self._hands.now_s()

    def forget_suspicion(self) -> None:
        """The cause is known, or the generation is past."""
        self.suspected_s = None

    def answered(self, answer: str) -> None:
        """The generation that answers the current failures is ready; ``answer``: see ``Failure``."""
        self.history.extend(replace(failure, answer=answer) for failure in self.current)
        self.current = []
        self.suspected_s = None

    def may_try(self, committed: int) -> bool:
        """Count one more decision; False when too many in a row brought no new committed step."""
        self._attempts = self._attempts + 1 if self._attempts_since == committed else 1
        self._attempts_since = committed
        return self._attempts <= self._max_attempts

    def loop(self, limit: int) -> str:
        """What to say when a rank has died ``limit`` times in a row at one step, whoever held it; else empty."""
        for failure in self.current:
            step, times = self._falls.get(failure.rank, (0, 0)) if failure.rank is not None else (0, 0)
            if times >= limit:
                return (
                    f"rank {failure.rank} died {times} times in a row at step {step}: another process in its "
                    "place does not help"
                )
        return ""
