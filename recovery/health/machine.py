"""The health service of this machine: its NVIDIA devices, and what other monitors report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from trainchaos.recovery.health.readings.reading import HealthSource
from trainchaos.recovery.health.readings.reports import ReportFile
from trainchaos.recovery.health.service import HealthService, device_detectors
from trainchaos.recovery.health.sources.nvml import NvmlSource
from trainchaos.recovery.health.sources.reported import ReportedSource


def machine_service(
    devices: Iterable[str],
    *,
    reports: Path | None = None,
    notify: Callable[[], None] = lambda: None,
) -> HealthService:
    """A service that is not started yet. ``devices``: those of the job, as torch names them: NVML
    is read if one is a GPU; ``reports``: a file of ``recovery.health.readings.reports``, of which
    what is appended from now on counts, and which may come into being later; ``notify``: as for the
    service. Without either there is nothing to read, and no thread is started.
    """
    sources: list[HealthSource] = []
    if any(device.startswith("cuda") for device in devices):
        sources.append(NvmlSource())
    if reports is not None:
        sources.append(ReportedSource(ReportFile(reports, new_only=True)))
    return HealthService(sources, device_detectors(), notify=notify)
