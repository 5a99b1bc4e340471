"""Drops packets on links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.links import collectives_s, probed
from trainchaos.chaos.fault.targets import LinkShape, LinkTarget

LATE_S = 0.15  # most of a retransmission timeout of 0.2 s


class LinkLoss(Fault):
    """TCP segments are lost and arrive one retransmission later: a bad cable, an overloaded switch.
    Real where the kernel carries the links between nodes (docker: it drops packets of one segment
    each); else emulated.

    The link proxy emulates it: a segment chosen to be lost, and all bytes behind it, wait one
    retransmission timeout (200 ms, the minimum on Linux). As with TCP, the application loses no
    bytes. ``percent``: share of segments of 1448 bytes. Landed: in some of the job's steps a
    collective took a retransmission timeout longer than it usually did before, and a probe of the
    link has reported, whether it came through or not.
    """

    where: ClassVar[Where] = Where.LINK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    percent: float = Field(gt=0, le=50)

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Lose segments."""
        by = target.shape(LinkShape(loss=self.percent / 100))
        return {"requested_loss_percent": self.percent, "by": by}

    def heal(self, target: LinkTarget) -> None:
        """Stop losing segments."""
        target.shape(LinkShape())

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The target's steps since the injection with a late collective."""
        measured = probed(occurrence, events)
        before, during = collectives_s(occurrence, events)
        if measured is None or not before:
            return None
        late = [seconds for seconds in during if seconds - median(before) > LATE_S]
        if not late:
            return None
        evidence = {
            "requested_loss_percent": self.percent,
            "late_steps": len(late),
            "steps": len(during),
            "slowest_collective_ms": round(1000 * max(late), 1),
            **measured,
        }
        return Landed(witness="job: timing of collectives", evidence=evidence)
