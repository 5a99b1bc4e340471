"""Partitions the network between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.links import stood_still
from trainchaos.chaos.fault.targets import LinkShape, LinkTarget

LEAST_S = 0.2


class Partition(Fault):
    """Nothing passes between the chosen ranks and the others; ranks on the same side still reach
    each other. Real where the kernel carries the links between nodes (docker: packets are dropped);
    else emulated by the link proxy.

    Open connections stay open with their bytes held back, and new ones cannot be made; after
    healing, held bytes pass, as when a cable is plugged in again. The supervisor still reaches both
    sides. ``one_way``: block only what the chosen ranks (or ``link.src``) send. Landed: a
    collective of the job stood still for 0.2 s, or the job gave up the process group because of a
    stuck collective; and a probe of the link has reported, whether it came through or not.
    """

    where: ClassVar[Where] = Where.LINK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    lasting: ClassVar[bool] = True
    separates: ClassVar[bool] = True

    one_way: bool = False

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Cut the links."""
        by = target.shape(LinkShape(blocked=True), both_ways=not self.one_way)
        return {
            "cut_links": [list(link) for link in target.links],
            "one_way": self.one_way,
            "by": by,
        }

    def heal(self, target: LinkTarget) -> None:
        """Restore the links."""
        target.shape(LinkShape(), both_ways=True)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The job's slowest collective since the injection, or the failure it detected."""
        return stood_still(occurrence, events, LEAST_S)
