"""A rank dies at the same place again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, Ends
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import RankTarget
from chaos.fault.witness import raised_and_exited


class CrashLoopError(RuntimeError):
    """The exception this fault raises in training code."""


class CrashLoop(Fault):
    """Whoever holds the rank raises at the same point of the same step, after every recovery too:
    bad data, a bug that only this rank's share meets. Real.

    The stack must notice that it makes no progress and stop with a clear word, or get past it
    without that rank. ``message``: text of the exception. Landed: the process ended with an exit
    code, and logged this error last.
    """

    where: ClassVar[Where] = Where.RANK
    relentless: ClassVar[bool] = True

    message: str = "injected crash"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Raise."""
        raise CrashLoopError(f"{self.message} (step {target.step}, rank {target.rank})")

    def follows(self) -> tuple[Consequence, ...]:
        """Its end."""
        return (Ends(code=True),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit code, and the error the rank logged as its last word."""
        return raised_and_exited(occurrence, events, (CrashLoopError.__name__,))
