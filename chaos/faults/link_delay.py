"""Adds latency to links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.links import collectives_s, probed
from trainchaos.chaos.fault.targets import LinkShape, LinkTarget


class LinkDelay(Fault):
    """Bytes on the links arrive later: a longer route, a full buffer. Real where the kernel carries
    the links between nodes (docker: netem, or, without netem, a packet queue in the receiver's
    namespace); else emulated above TCP by the link proxy.

    ``delay_ms``: added latency; ``jitter_ms``: random variation, more or less (order is kept).
    Landed: the job's own collective time, median of the first three whole steps under the fault,
    grew by at least half of the delay, and a probe of the link has reported. Its round trip is part
    of the evidence, without a bound.
    """

    where: ClassVar[Where] = Where.LINK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    delay_ms: float = Field(gt=0, le=10_000)
    jitter_ms: float = Field(default=0, ge=0, le=10_000)

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Delay the links."""
        by = target.shape(LinkShape(delay_s=self.delay_ms / 1000, jitter_s=self.jitter_ms / 1000))
        return {
            "requested_delay_ms": self.delay_ms,
            "requested_jitter_ms": self.jitter_ms,
            "by": by,
        }

    def heal(self, target: LinkTarget) -> None:
        """Remove the delay."""
        target.shape(LinkShape())

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Median collective time of the target's first three whole steps under the fault, and
        before.
        """
        measured = probed(occurrence, events)
        before, since = collectives_s(occurrence, events)
        during = since[1:4]
        if measured is None or len(during) < 3 or not before:
            return None
        grew_ms = 1000 * (median(during) - median(before))
        if grew_ms < self.delay_ms / 2:
            return None
        evidence = {
            "requested_delay_ms": self.delay_ms,
            "collective_grew_ms": round(grew_ms, 2),
            **measured,
        }
        return Landed(witness="job: timing of collectives", evidence=evidence)
