"""Reads health sources at a period and runs detectors, on a thread of its own, so that a driver or
a disk that does not answer holds up nobody else.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from trainchaos.recovery.health.detector import Alarm, Detector
from trainchaos.recovery.health.device_detectors import (
    EccDetector,
    IdleDetector,
    LinkDetector,
    ThermalDetector,
)
from trainchaos.recovery.health.nvml import NvmlSource
from trainchaos.recovery.health.readings import Problem, Problems, Reading
from trainchaos.recovery.health.signs import HealthAlarm, ReportFile, Sign

PERIOD_S = 1.0
"""Between two reads. NVML averages utilisation over 1/6 to 1 s, depending on the device (NVML API
reference, nvmlUtilization_t), and a read costs less than 1 ms a device (docs/health.md).
"""
CLOSE_LIMIT_S = 2.0
"""For the thread to end; a read of NVML takes milliseconds (docs/health.md). One that hangs in a
driver is left behind: it is a daemon, and ends with the process.
"""
MOST_WAITING = 1000
"""Signs that nobody has taken; the newest are dropped, and that is said once."""


class HealthSource(Protocol):
    """A place where readings come from. Neither call raises, and neither waits for a device."""

    @property
    def name(self) -> str:
        """For people, and for problems."""

    def read(self, now_s: float) -> Sequence[Reading | Sign]:
        """What can be read now, and what a driver says itself; what cannot be read is left out, and
        becomes a problem.
        """

    def problems(self) -> Sequence[Problem]:
        """Those found since the last call, each once in the life of the source."""


class HealthService:
    """Call ``start``, then ``take`` as often as you like, and ``close`` at the end. ``notify``:
    called on the service's thread after something was found. A source that raises, which it should
    not, becomes a problem, and the others are read.
    """

    def __init__(
        self,
        sources: Sequence[HealthSource],
        detectors: Sequence[Detector],
        *,
        period_s: float = PERIOD_S,
        notify: Callable[[], None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._detectors, self._period_s = sources, detectors, period_s
        self._notify, self._clock_s = notify, clock_s
        self._last_s: float | None = None
        self._signs: deque[Sign] = deque()
        self._problems = Problems("health")
        self._said: deque[Problem] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)

    def start(self) -> None:
        """Begin to read, if there is a source."""
        if self._sources:
            self._thread.start()

    def take(self) -> list[Sign]:
        """What was found since the last call, oldest first; never waits."""
        # as many as are there now: another thread may append meanwhile
        return [self._signs.popleft() for _ in range(len(self._signs))]

    def problems(self) -> list[Problem]:
        """What cannot be read, each said once."""
        return [self._said.popleft() for _ in range(len(self._said))]

    def close(self) -> None:
        """End the thread and release the sources. Safe to repeat."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S)

    def look(self) -> None:
        """Read once, if a read is due; after a clock that jumped back, one is due at once."""
        now_s = self._clock_s()
        due = self._last_s is None or not 0 <= now_s - self._last_s < self._period_s
        readings: list[Reading] = []
        signs: list[Sign] = []
        for source in self._sources if due else ():
            try:
                for found in source.read(now_s):
                    if isinstance(found, Reading):
                        readings.append(found)
                    else:
                        signs.append(found)
                self._said += source.problems()
            except Exception as error:  # a source of somebody else's
                self._problems.note(source.name, "", error)
        self._last_s = now_s if due else self._last_s
        for detector in self._detectors:
            signs += [_as_sign(alarm, now_s) for alarm in detector.look(readings, now_s)]
        room = MOST_WAITING - len(self._signs)
        if len(signs) > room:
            why = f"more than {MOST_WAITING} wait to be taken: the newest are dropped"
            self._problems.note("signs", "", why)
        self._signs += signs[: max(0, room)]
        self._said += self._problems.take()
        if signs:
            self._notify()

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                self.look()
                self._closed.wait(self._period_s)
        finally:
            for source in self._sources:
                release = getattr(source, "close", None)
                if release is not None:
                    release()


def machine_service(
    devices: Iterable[str],
    *,
    reports: Path | None = None,
    notify: Callable[[], None] = lambda: None,
) -> HealthService:
    """The service of this machine, not started yet: its NVIDIA devices, and what other monitors
    report. ``devices``: those of the job, as torch names them: NVML is read if one is a GPU;
    ``reports``: a file of reports, of which what is appended from now on counts, and which may come
    into being later. Without either there is nothing to read, and no thread is started.
    """
    sources: list[HealthSource] = []
    if any(device.startswith("cuda") for device in devices):
        sources.append(NvmlSource())
    if reports is not None:
        sources.append(ReportFile(reports, new_only=True))
    return HealthService(sources, device_detectors(), notify=notify)


def device_detectors() -> list[Detector]:
    """Detectors of what devices say of themselves."""
    return [EccDetector(), ThermalDetector(), LinkDetector(), IdleDetector()]


def _as_sign(alarm: Alarm, now_s: float) -> HealthAlarm:
    return HealthAlarm(
        what=alarm.what,
        **alarm.where._asdict(),
        lasted_s=_finite(max(0.0, now_s - alarm.since_s)),
        value=_finite(alarm.value),
        threshold=_finite(alarm.threshold),
        evidence={
            name: _finite(value) if isinstance(value, float) else value
            for name, value in alarm.evidence.items()
        },
    )


def _finite(value: float) -> float:
    """The value as JSON can hold it: infinite ones as the largest that there is, none as 0."""
    return 0.0 if math.isnan(value) else min(max(value, -1e308), 1e308)
