"""One rank gets the wrong data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, SaidByTarget
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import RankTarget
from chaos.fault.witness import digests_differ


class DataCorrupt(Fault):
    """One rank's samples of a step hold the content of others: a wrong index, a stale cache, a
    damaged shard. Real.

    ``shift``: the content under each id is that of the sample so many further on. The ids that the
    job accounts for stay right and the loss stays plausible: silent, but for a comparison with an
    unfaulted run (loss-equality). Landed: the rank's own digest of what it is to compute differs
    from that of what it was given.
    """

    where: ClassVar[Where] = Where.RANK
    corrupts: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data",)

    shift: int = Field(default=1, ge=1)

    def point(self, phase: str) -> str:
        """Before the samples are loaded."""
        return "data"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Shift them."""
        target.shift_samples(self.shift)
        return {"shift": self.shift}

    def follows(self) -> tuple[Consequence, ...]:
        """The rank's own account."""
        return (SaidByTarget(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Digests before and after, taken by the rank's own code."""
        return digests_differ(occurrence, events, "rank: digests of its samples")
