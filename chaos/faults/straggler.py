"""Slows down a rank's computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import commits_timed


class Straggler(Fault):
    """The rank's compute phases take ``factor`` times as long: a hot or degraded GPU, a noisy
    neighbour.

    ``mode``: ``duty-cycle`` stretches forward, backward and optimizer by sleeping (emulated);
    ``cpu-contention`` runs threads that compete for the rank's core (real); ``cgroup-quota`` gives
    the rank's process a quota of processor time in a control group (real, as root);
    ``sm-contention`` runs matrix products on the rank's GPU (real, CUDA only). The real modes are
    only as exact as the machine, so the evidence shows the measured factor beside the requested
    one. Landed: the job's own phase times of that rank grew by at least half of the requested
    slowdown.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    factor: float = Field(gt=1, le=100)
    mode: Literal["duty-cycle", "cpu-contention", "cgroup-quota", "sm-contention"] = "duty-cycle"

    def wants(self) -> frozenset[Need]:
        """``cgroup-quota`` needs a control group."""
        return frozenset({Need.CGROUP}) if self.mode == "cgroup-quota" else frozenset()

    def acts(self, *, cuda: bool, real: frozenset[Need] = frozenset()) -> Fidelity:
        """Only ``duty-cycle``, which sleeps, is emulated."""
        return Fidelity.EMULATED if self.mode == "duty-cycle" else Fidelity.REAL

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Slow down."""
        how = target.set_slowdown(self.factor, self.mode)
        return {"requested_factor": self.factor, "how": how}

    def heal(self, target: RankTarget) -> None:
        """Full speed again."""
        target.set_slowdown(1.0, self.mode)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Median compute time of the target's first three whole steps under the fault, and before.

        Real contention takes a while to have an effect, so there any three consecutive steps count.
        """
        commits = commits_timed(events, occurrence.process, "forward", "backward")
        before = [_compute_s(e) for e in commits if e.time_ns < occurrence.time_ns]
        after = [_compute_s(e) for e in commits if e.time_ns > occurrence.time_ns][1:]
        rows = 1 if self.mode == "duty-cycle" else len(after)
        windows = [after[first : first + 3] for first in range(min(rows, len(after) - 2))]
        if not windows or not before:
            return None
        measured = max(median(window) for window in windows) / median(before)
        if measured < 1 + (self.factor - 1) / 2:
            return None
        return Landed(
            witness="job: phase times",
            evidence={"requested_factor": self.factor, "measured_factor": round(measured, 2)},
        )


def _compute_s(event: Event) -> float:
    seconds = event.data["seconds"]
    return float(seconds["forward"] + seconds["backward"])
