"""Tells the job's coordinator of places that are about to fail, as the health sources report
them.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.harness.launch.health import HealthReport
from trainchaos.harness.run.coordinator import Coordinator
from trainchaos.harness.run.scene import BuiltInScene
from trainchaos.recovery.health.credible import failing


class HealthWatch:
    """The warnings of one arm. Each is repeated until its process is gone: a coordinator may be
    lost before it acts on one, and a second time means nothing to it.
    """

    def __init__(self, scene: BuiltInScene, coordinator: Coordinator) -> None:
        self._scene = scene
        self._coordinator = coordinator
        self._open: dict[str, str] = {}

    def heard(self, report: HealthReport) -> None:
        """A health source has reported something; most of it is no warning."""
        if why := failing(report.what, report.code):
            place = report.device or f"node {report.node}"
            self._scene.roster.avoid(
                node=report.node if report.device is None else None, device=report.device
            )
            for process in self._on(report):
                self._open.setdefault(process, f"{why}, on {place}")

    def tell(self) -> None:
        """Tell the coordinator, if there is one now."""
        gone = [process for process in self._open if self._scene.roster.gone(process)]
        for process in gone:
            del self._open[process]
        if self._open:
            self._coordinator.supervise(lambda c: c.on_warnings(self._open))

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
                name for name in scene.roster.there() if scene.device_of(name) == report.device
            )
