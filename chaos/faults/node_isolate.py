"""Cuts a node off from all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.links import stood_still
from trainchaos.chaos.fault.targets import LinkShape, LinkTarget

LEAST_S = 0.2


class NodeIsolate(Fault):
    """Nothing passes between the ranks of one node and all other ranks: a dead switch port. Real
    where the kernel carries the links between nodes (docker); else emulated by the link proxy.

    Choose the node with ``target: {node: n, select: all}``. The node's ranks still reach each
    other. ``control``: ``kept`` leaves the supervisor's connection to them, as over a separate
    control network; ``cut`` cuts it too (needs nodes that are machines). Landed: a collective of
    the job stood still for 0.2 s, or the job gave up the process group because of a stuck
    collective; and a probe of the link has reported, whether it came through or not.
    """

    where: ClassVar[Where] = Where.LINK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    lasting: ClassVar[bool] = True
    separates: ClassVar[bool] = True

    control: Literal["kept", "cut"] = "kept"

    def wants(self) -> frozenset[Need]:
        """Cutting the control connection needs nodes that are machines."""
        return self.needs | ({Need.MACHINES} if self.control == "cut" else frozenset())

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Cut."""
        by = target.shape(LinkShape(blocked=True), both_ways=True)
        if self.control == "cut":
            target.cut_control(True)
        return {
            "cut_links": [list(link) for link in target.links],
            "control": self.control,
            "by": by,
        }

    def heal(self, target: LinkTarget) -> None:
        """Restore the links first, as they were cut first, then the control connection."""
        target.shape(LinkShape(), both_ways=True)
        if self.control == "cut":
            target.cut_control(False)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The job's slowest collective since the injection, or the failure it detected."""
        return stood_still(occurrence, events, LEAST_S)
