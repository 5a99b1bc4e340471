"""The network falls apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from chaos.fault.links import stood_still
from chaos.fault.targets import LinkShape, LinkTarget

LEAST_S = 0.2


class Partition(Fault):
    """Nothing passes between the chosen ranks and the others; among themselves each side talks on.
    Real where the kernel carries the links between nodes (docker: packets are dropped), else
    emulated by the link proxy.

    Bytes wait, connections live on and new ones are not made, and when it heals what waited goes
    on, as after a cable is plugged in again. The supervisor hears both sides. ``one_way``: only
    what the chosen ranks (or ``link.src``) send is held. Landed: a collective of the job stood
    still for 0.2 s, or the job gave the group up for a stuck collective; whether a probe came
    through stands beside it.
    """

    where: ClassVar[Where] = Where.LINK
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    lasting: ClassVar[bool] = True
    separates: ClassVar[bool] = True

    one_way: bool = False

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Cut."""
        by = target.shape(LinkShape(blocked=True), both_ways=not self.one_way)
        return {
            "cut_links": [list(link) for link in target.links],
            "one_way": self.one_way,
            "by": by,
        }

    def heal(self, target: LinkTarget) -> None:
        """Whole again."""
        target.shape(LinkShape(), both_ways=True)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The job's slowest collective since, or the failure it detected."""
        return stood_still(occurrence, events, LEAST_S)
