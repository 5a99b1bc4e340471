"""Gives one rank the wrong data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Occurrence, ReportedByTarget
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import digests_differ


class DataCorrupt(Fault):
    """One rank's samples of a step hold the content of other samples: a wrong index, a stale cache,
    a damaged shard. Real.

    ``shift``: each id gets the content of the sample that many ids later. The recorded sample ids
    stay right and the loss stays plausible, so only a comparison with a fault-free run
    (loss-equality) shows it. Landed: the rank's own digest of the data it computes differs from the
    digest of the data it was given.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    corrupts: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data",)

    shift: int = Field(default=1, ge=1)

    def point(self, phase: str) -> str:
        """The data phase, before samples are loaded."""
        return "data"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Shift the samples."""
        target.shift_samples(self.shift)
        return {"shift": self.shift}

    def follows(self) -> tuple[Consequence, ...]:
        """The rank itself reports the change."""
        return (ReportedByTarget(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Digests before and after, taken by the rank's own code."""
        return digests_differ(occurrence, events, "rank: digests of its samples")
