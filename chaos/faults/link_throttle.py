"""A rank's link becomes slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from chaos.events import Event, Kind
from chaos.fault import Fault, Fidelity, Landed, Need, Occurrence, Where
from chaos.targets import RankTarget

TOLERANCE = 0.25  # of the requested rate; the collective itself takes time on top of the bucket's


class LinkThrottle(Fault):
    """What a rank sends passes slowly: a congested switch, a downgraded NIC. Emulated.

    ``mbit_per_s``: rate. ``method``: ``bucket``, a token bucket in the rank's communication path, for any backend,
    ``latency_ms`` added to each collective; ``proxy``, the link proxy on each link to another rank, ``latency_ms``
    added to each chunk. Landed: the job's own
    timing of its collectives shows a bandwidth near or below the requested one, and lower than before.
    """

    where: ClassVar[Where] = Where.RANK
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    mbit_per_s: float = Field(gt=0)
    latency_ms: float = Field(default=0, ge=0)
    method: Literal["bucket", "proxy"] = "bucket"

    def wants(self) -> frozenset[Need]:
        """The proxy, for its method."""
        return frozenset({Need.LINK_PROXY}) if self.method == "proxy" else frozenset()

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Install the bucket."""
        target.set_link(self.mbit_per_s * 1e6 / 8, self.latency_ms / 1000, method=self.method)
        return {"requested_mbit_per_s": self.mbit_per_s, "method": self.method}

    def heal(self, target: RankTarget) -> None:
        """Remove it."""
        target.set_link(None, 0, method=self.method)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Bytes and seconds of the target's collectives in its first three steps under it, and before."""
        commits = [e for e in events if e.kind is Kind.STEP_COMMITTED and e.actor == occurrence.process]
        before = [e for e in commits if e.time_ns < occurrence.time_ns]
        # The step in which the fault began may have had its collective already.
        during = [e for e in commits if e.time_ns > occurrence.time_ns][1:4]
        if len(during) < 3 or not before:
            return None
        measured, usual = _mbit_per_s(during), _mbit_per_s(before)
        if measured > self.mbit_per_s * (1 + TOLERANCE) or measured >= usual:
            return None
        evidence = {
            "requested_mbit_per_s": self.mbit_per_s,
            "measured_mbit_per_s": round(measured, 2),
            "before_mbit_per_s": round(usual, 2),
        }
        return Landed(witness="job: timing of collectives", evidence=evidence)


def _mbit_per_s(commits: Sequence[Event]) -> float:
    size = sum(e.data["wire_bytes"] for e in commits)
    seconds = sum(e.data["seconds"]["collective"] for e in commits)
    return size * 8 / 1e6 / seconds if seconds else float("inf")
