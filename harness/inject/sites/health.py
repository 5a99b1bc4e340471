"""The health source, reporting on a rank's device or a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.emulated_devices import METRICS, Changed, EmulatedDevices
from trainchaos.harness.inject.sites import Aims, MissingTarget, OccurrenceTarget, Site, miss_rank
from trainchaos.recovery.health.signs import HealthReport, ReportFile


@dataclass(frozen=True)
class HealthHandle:
    """The source, and the device or node to report on; see chaos.fault.targets.HealthTarget.
    ``devices``: emulated ones, whose values can be changed.
    """

    source: ReportFile
    devices: EmulatedDevices
    node: int | None
    rank: int | None
    device: str | None

    def report(self, *, what: str, code: int) -> None:
        """Append a report to the source, or change what a device's monitor reads."""
        if what in METRICS:
            self.devices.change(Changed(what, code, self.rank, self.node, self.device))
            return
        fields: dict[str, Any] = {"what": what, "code": code, "source": "injected"}
        fields |= {"node": self.node, "rank": self.rank, "device": self.device}
        self.source.append(HealthReport.model_validate(fields))

    def spoil(self) -> None:
        """A preflight of the device, or of all devices of the node, finds it unfit."""
        self.devices.spoil(self.node, self.device)


class HealthSite(Site):
    """One occurrence for each rank, or for each node."""

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """The ranks held now, then the nodes."""
        source, devices = self._scene.health, self._scene.devices
        if source is None or devices is None:
            return [
                MissingTarget(
                    who={"ranks": list(planned.ranks)}, reason="nobody reads a health source here"
                )
            ]
        found: list[OccurrenceTarget | MissingTarget] = []
        for rank in planned.ranks:
            process = self._scene.process_of(rank)
            if process is None:
                found.append(miss_rank(rank))
                continue
            handle = HealthHandle(source, devices, None, rank, self._scene.device_of(process))
            who: Mapping[str, Any] = {"process": process, "rank": rank, "device": handle.device}
            found.append(OccurrenceTarget(target=handle, who=who, rank=rank, processes=(process,)))
        for node in planned.nodes:
            who = {"node": node, "processes": self._scene.on_node(node)}
            found.append(
                OccurrenceTarget(target=HealthHandle(source, devices, node, None, None), who=who)
            )
        return found

    def reachable(self, planned: PlannedFault) -> bool:
        return self._all_held(planned.ranks)
