"""Makes one replica drift away from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Occurrence, ReportedByTarget
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import digests_differ


class ReplicaDesync(Fault):
    """All parameters of one rank are scaled by 1 + ``amount``, a small change: a missed update, a
    different kernel. Real.

    Nothing is non-finite and no loss jumps; only a comparison of replicas shows it
    (replica-equality, at the next digest). Landed: the rank's own digest of its parameters differs
    from the one taken just before.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data", "forward")
    corrupts: ClassVar[bool] = True
    changes_state: ClassVar[bool] = True

    amount: float = Field(default=1e-3, gt=0, le=0.5)

    def point(self, phase: str) -> str:
        """The forward phase, at its start."""
        return "forward"

    def changes(self) -> str:
        """The parameters."""
        return "parameter"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Scale the parameters."""
        for tensor in target.tensors(self.changes()).values():
            tensor.mul_(1 + self.amount)
        return {"amount": self.amount}

    def follows(self) -> tuple[Consequence, ...]:
        """The rank itself reports the change."""
        return (ReportedByTarget(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Digests before and after, taken by the rank's own code."""
        return digests_differ(occurrence, events, "rank: parameter digests")
