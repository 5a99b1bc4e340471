"""Takes links down and up repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.links import stood_still
from trainchaos.chaos.fault.targets import LinkShape, LinkTarget


class LinkFlap(Fault):
    """The links alternate between passing nothing for ``down_s`` seconds and everything for
    ``up_s``: a loose plug. Real where the kernel carries the links between nodes (docker: packets
    are dropped while down); else emulated by the link proxy.

    Both directions flap, starting down; connections stay open. Landed: a collective of the job took
    half of ``down_s`` longer than it usually did before, or the job gave up the process group
    because of a stuck collective; and a probe of the link has reported, whether it came through or
    not.
    """

    where: ClassVar[Where] = Where.LINK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    lasting: ClassVar[bool] = True

    down_s: float = Field(gt=0, le=600)
    up_s: float = Field(gt=0, le=600)

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Start with the links down."""
        by = target.shape(LinkShape(down_s=self.down_s, up_s=self.up_s), both_ways=True)
        return {"requested_down_s": self.down_s, "requested_up_s": self.up_s, "by": by}

    def heal(self, target: LinkTarget) -> None:
        """Bring the links up permanently."""
        target.shape(LinkShape(), both_ways=True)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The job's slowest collective since the injection, or the failure it detected."""
        return stood_still(occurrence, events, self.down_s / 2)
