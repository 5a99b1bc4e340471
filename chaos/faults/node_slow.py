"""A node has too little processor time for what runs on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event, Kind
from chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from chaos.fault.targets import NodeTarget
from chaos.fault.witness import effects_of

LEAST = 1.25  # as many times as long as before


class NodeSlow(Fault):
    """All that runs on a node shares ``cores`` of processor time: a noisy neighbour, a throttled
    machine. Real.

    By a quota of the kernel's: on the node's own control group where the node is a container, its
    agent included, else on one group for each of its processes, an equal part each. What a rank
    gets depends on what it asks for; what was measured stands beside it. Landed: the kernel counts
    periods in which they had to wait, and the forward and backward phases of a rank there took a
    quarter longer than before by its own account.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES, Need.QUOTA})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    cores: float = Field(
        ge=0.02, le=1024, description="processor time for the whole node, in cores"
    )

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Limit it."""
        target.ration(self.cores)
        return {"requested_cores": self.cores}

    def heal(self, target: NodeTarget) -> None:
        """As much as there is."""
        target.unration()

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The slowest three steps in a row of any rank there, and its usual ones."""
        kept = max(
            (effect.get("throttled", 0) for effect in effects_of(occurrence, events)), default=0
        )
        slower = max(
            (_grown(occurrence, events, name) for name in occurrence.processes), default=0.0
        )
        if not kept or slower < LEAST:
            return None
        evidence = {
            "requested_cores": self.cores,
            "throttled": kept,
            "measured_factor": round(slower, 2),
        }
        return Landed(witness="kernel: periods of waiting; job: phase times", evidence=evidence)


def _grown(occurrence: Occurrence, events: Sequence[Event], process: str) -> float:
    """As many times as long a process's phases took since, at worst; 0: not known."""
    commits = [e for e in events if e.kind is Kind.STEP_COMMITTED and e.actor == process]
    before = [_compute_s(e) for e in commits if e.time_ns < occurrence.time_ns]
    after = [_compute_s(e) for e in commits if e.time_ns > occurrence.time_ns][1:]
    windows = [median(after[first : first + 3]) for first in range(len(after) - 2)]
    usual = median(before) if before else 0.0
    return max(windows) / usual if windows and usual else 0.0


def _compute_s(event: Event) -> float:
    seconds = event.data["seconds"]
    return float(seconds["forward"] + seconds["backward"])
