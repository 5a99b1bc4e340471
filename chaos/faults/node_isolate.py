"""A node is cut off from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events import Event
from chaos.fault import Fault, Fidelity, Landed, Need, Occurrence, Where
from chaos.linkevidence import stood_still
from chaos.targets import LinkShape, LinkTarget

LEAST_S = 0.2


class NodeIsolate(Fault):
    """Nothing passes between the ranks of one node and all others: its switch port is dead. Emulated.

    As partition, by the link proxy; choose the node with ``target: {node: n, select: all}``. The node's ranks talk
    on among themselves, and the supervisor hears them. Landed: a collective of the job stood still for 0.2 s, or
    the job gave the group up for a stuck collective; whether a probe came through stands beside it.
    """

    where: ClassVar[Where] = Where.LINK
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LINK_PROXY})
    lasting: ClassVar[bool] = True
    separates: ClassVar[bool] = True

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Cut."""
        target.shape(LinkShape(blocked=True), both_ways=True)
        return {"cut_links": [list(link) for link in target.links]}

    def heal(self, target: LinkTarget) -> None:
        """Whole again."""
        target.shape(LinkShape(), both_ways=True)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The job's slowest collective since, or the failure it detected."""
        return stood_still(occurrence, events, LEAST_S)
