"""Limits the bandwidth of a rank's links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.links import probed
from trainchaos.chaos.fault.targets import LinkShape, LinkTarget
from trainchaos.chaos.fault.witness import commits_timed

TOLERANCE = 0.25  # of the requested rate; the collective itself takes time on top of the bucket's


class LinkThrottle(Fault):
    """A rank's outgoing bandwidth is limited: a congested switch, a downgraded NIC. Method
    ``bucket`` is emulated; ``links`` is real where the kernel carries the links between nodes
    (docker), else emulated by the link proxy.

    ``mbit_per_s``: rate. ``method``: ``bucket`` is a token bucket in the rank's communication path,
    for any backend, with ``latency_ms`` added to each collective; ``links`` shapes each of the
    rank's links to other ranks, with ``latency_ms`` of delay. Landed: the job's own collective
    times show a bandwidth near or below the requested one (of all these links together), and lower
    than before; with ``links``, an independent client on the first link must measure the same.
    """

    where: ClassVar[Where] = Where.LINK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    may_need: ClassVar[frozenset[Need]] = frozenset({Need.LINKS})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    mbit_per_s: float = Field(gt=0)
    latency_ms: float = Field(default=0, ge=0)
    method: Literal["bucket", "links"] = "bucket"

    def wants(self) -> frozenset[Need]:
        """The ``links`` method needs links that can be shaped."""
        return frozenset({Need.LINKS}) if self.method == "links" else frozenset()

    def act(self, target: LinkTarget) -> Mapping[str, Any]:
        """Install the bucket, or shape the links."""
        rate, latency_s = self.mbit_per_s * 1e6 / 8, self.latency_ms / 1000
        by = "token bucket in the rank"
        if self.method == "bucket":
            target.pace(rate, latency_s)
        else:
            by = target.shape(LinkShape(bytes_per_s=rate, delay_s=latency_s))
        return {"requested_mbit_per_s": self.mbit_per_s, "method": self.method, "by": by}

    def heal(self, target: LinkTarget) -> None:
        """Remove the limit."""
        if self.method == "bucket":
            target.pace(None, 0)
        else:
            target.shape(LinkShape())

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Collective bandwidth of the target's first three whole steps under the fault,
        and before.
        """
        commits = commits_timed(events, occurrence.process, "collective")
        before = [e for e in commits if e.time_ns < occurrence.time_ns]
        # The step in which the fault began may have had its collective already.
        during = [e for e in commits if e.time_ns > occurrence.time_ns][1:4]
        if len(during) < 3 or not before:
            return None
        measured, usual = _mbit_per_s(during), _mbit_per_s(before)
        most = self.mbit_per_s * (1 + TOLERANCE)
        # Each link is limited on its own, and a collective may use several at once.
        lanes = len(occurrence.target.get("links", ())) if self.method == "links" else 1
        if measured > most * max(1, lanes) or measured >= usual:
            return None
        evidence: dict[str, Any] = {
            "requested_mbit_per_s": self.mbit_per_s,
            "job_mbit_per_s": round(measured, 2),
            "before_mbit_per_s": round(usual, 2),
        }
        if self.method == "bucket":
            evidence["measured_mbit_per_s"] = evidence["job_mbit_per_s"]
            return Landed(witness="job: timing of collectives", evidence=evidence)
        client = probed(occurrence, events)
        if (
            client is None
            or client["measured_mbit_per_s"] is None
            or client["measured_mbit_per_s"] > most
        ):
            return None
        return Landed(
            witness="an uninvolved client on the link, and the job",
            evidence=evidence | dict(client),
        )


def _mbit_per_s(commits: Sequence[Event]) -> float:
    size = sum(e.data["wire_bytes"] for e in commits)
    seconds = sum(e.data["seconds"]["collective"] for e in commits)
    return size * 8 / 1e6 / seconds if seconds else float("inf")
