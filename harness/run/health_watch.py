"""Tells the job's coordinator of places that are about to fail, as the health sources report
them.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.harness.run.coordinator import Coordinator
from trainchaos.harness.run.scene import BuiltInScene
from trainchaos.recovery.health.credible import failing
from trainchaos.recovery.health.readings.reports import HealthReport


class HealthWatch:
    """The warnings of one arm. Each is repeated until its process is gone: a coordinator may be
    lost before it acts on one, and a second time means nothing to it.
    """

    def __init__(self, scene: BuiltInScene, coordinator: Coordinator) -> None:
        self._scene = scene
        self._coordinator = coordinator
        self._open: dict[str, str] = {}
        self._nodes: set[int] = set()  # that are about to fail
        self._devices: set[str] = set()

    def heard(self, report: HealthReport) -> None:
        """A health source has reported something; most of it is no warning."""
        why = failing(report.what, report.code)
        if not why:
            return
        names = list(self._on(report))
        if report.device is not None:
            self._devices.add(report.device)
        elif report.node is not None:
            self._nodes.add(report.node)
        self._scene.roster.avoid(nodes=self._nodes, devices=self._devices)
        place = report.device or f"node {report.node}"
        self._open |= {name: f"{why}, on {place}" for name in names if name not in self._open}

    def tell(self) -> None:
        """Tell the coordinator, if there is one now."""
        if not self._nodes and not self._devices and not self._open:
            return
        roster = self._scene.roster
        self._open = {name: why for name, why in self._open.items() if not roster.gone(name)}
        late = [name for name in roster.living() if name not in self._open and self._fails(name)]
        self._coordinator.supervise(lambda c: c.on_warnings(self._open))
        self._coordinator.supervise(lambda c: c.no_better_place(late))

    def _fails(self, process: str) -> bool:
        """Whether a process is at a place that is about to fail."""
        scene = self._scene
        return scene.node_of(process) in self._nodes or scene.device_of(process) in self._devices

    def _on(self, report: HealthReport) -> Iterator[str]:
        """The processes at the place of a report."""
        scene = self._scene
        if report.rank is not None:
            holder = scene.process_of(report.rank)
            yield from (holder,) if holder else ()
        elif report.node is not None:
            yield from scene.roster.on_node(report.node)
        elif report.device is not None:
            yield from (
                name for name in scene.roster.living() if scene.device_of(name) == report.device
            )
