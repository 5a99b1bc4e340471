"""Limits the processor time of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.targets import NodeTarget
from trainchaos.chaos.fault.witness import commits_timed, effects_of

LEAST = 1.25  # slowdown factor


class NodeSlow(Fault):
    """All processes of a node share ``cores`` of processor time: a noisy neighbour, a throttled
    machine. Real.

    A kernel CPU quota enforces it: on the node's control group where the node is a container (its
    agent included), else on one group per process with an equal part each. A rank's share depends
    on its demand; the evidence shows the measured slowdown. Landed: the kernel counted throttled
    periods, and a rank on the node itself reported forward and backward phases a quarter longer
    than before.
    """

    where: ClassVar[Where] = Where.NODE
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES, Need.QUOTA})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    cores: float = Field(
        ge=0.02, le=1024, description="processor time for the whole node, in cores"
    )

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Limit the processor time."""
        target.ration(self.cores)
        return {"requested_cores": self.cores}

    def heal(self, target: NodeTarget) -> None:
        """Remove the limit."""
        target.unration()

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Compares the slowest three consecutive steps of any rank on the node with its
        usual ones.
        """
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
    """A process's worst slowdown factor of its compute phases since the injection; 0: unknown."""
    commits = commits_timed(events, process, "forward", "backward")
    before = [_compute_s(e) for e in commits if e.time_ns < occurrence.time_ns]
    after = [_compute_s(e) for e in commits if e.time_ns > occurrence.time_ns][1:]
    windows = [median(after[first : first + 3]) for first in range(len(after) - 2)]
    usual = median(before) if before else 0.0
    return max(windows) / usual if windows and usual else 0.0


def _compute_s(event: Event) -> float:
    seconds = event.data["seconds"]
    return float(seconds["forward"] + seconds["backward"])
