"""Crashes a rank at the same place again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Ends, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import raised_and_exited


class CrashLoopError(RuntimeError):
    """Raised by this fault in training code."""


class CrashLoop(Fault):
    """The rank raises at the same point of the same step after every recovery, in whichever process
    holds it: bad data, a bug that only this rank's data triggers. Real.

    The stack must notice the lack of progress and stop with a clear message, or continue without
    that rank. ``message``: text of the exception. Landed: the process ended with a nonzero exit
    code, and this error is the last one it logged.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    relentless: ClassVar[bool] = True

    message: str = "injected crash"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Raise."""
        raise CrashLoopError(f"{self.message} (step {target.step}, rank {target.rank})")

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(code=True),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit code, and the last error the rank logged."""
        return raised_and_exited(occurrence, events, (CrashLoopError.__name__,))
