"""Reads health sources and runs detectors on a thread of its own, so that a driver or a disk that
does not answer holds up nobody else.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, get_args

from trainchaos.recovery.health.detectors.base import Alarm, Detector
from trainchaos.recovery.health.detectors.ecc import EccDetector
from trainchaos.recovery.health.detectors.idle import IdleDetector
from trainchaos.recovery.health.detectors.link import LinkDetector
from trainchaos.recovery.health.detectors.thermal import ThermalDetector
from trainchaos.recovery.health.monitor import PERIOD_S, Monitor
from trainchaos.recovery.health.readings.reading import HealthSource, Place, Problem, Reading
from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.health.readings.signs import HealthAlarm, Sign

CLOSE_LIMIT_S = 2.0
"""For the thread to end; a read of NVML takes milliseconds (docs/health.md). One that hangs in a
driver is left behind: it is a daemon, and ends with the process.
"""
MOST_WAITING = 1000
"""Signs that nobody has taken; the newest are dropped, and that is said once."""
REPORTED = "reported_"
DEVICE_LOST = "device-lost"
_T = TypeVar("_T")
_WHAT = get_args(HealthReport.model_fields["what"].annotation)


def device_detectors() -> list[Detector]:
    """Detectors of what devices say of themselves."""
    return [EccDetector(), ThermalDetector(), LinkDetector(), IdleDetector()]


class HealthService:
    """Call ``start``, then ``take`` as often as you like, and ``close`` at the end. ``notify``:
    called on the service's thread after something was found.
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
        self._monitor = Monitor(sources=sources, period_s=period_s)
        self._detectors, self._notify, self._clock_s = detectors, notify, clock_s
        self._signs: deque[Sign] = deque()
        self._problems: deque[Problem] = deque()
        self._lost: set[Place] = set()
        self._full = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)

    def start(self) -> None:
        """Begin to read, if there is a source."""
        if self._monitor.sources:
            self._thread.start()

    def take(self) -> list[Sign]:
        """What was found since the last call, oldest first; never waits."""
        return _all(self._signs)

    def problems(self) -> list[Problem]:
        """What cannot be read, each said once."""
        return _all(self._problems)

    def close(self) -> None:
        """End the thread and release the sources. Safe to repeat."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S)

    def look(self) -> None:
        """Read once, if a read is due."""
        now_s = self._clock_s()
        readings = self._monitor.poll(now_s)
        found: list[Sign] = [sign for one in readings if (sign := self._said(one)) is not None]
        for detector in self._detectors:
            found += [_told(alarm, now_s) for alarm in detector.look(readings, now_s)]
        self._problems += self._monitor.problems()
        for sign in found:
            if len(self._signs) < MOST_WAITING:
                self._signs.append(sign)
            elif not self._full:
                self._full = True
                why = f"more than {MOST_WAITING} wait to be taken: the newest are dropped"
                self._problems.append(Problem("health", "signs", "", why))
        if found:
            self._notify()

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                self.look()
                self._closed.wait(self._monitor.period_s)
        finally:
            for source in self._monitor.sources:
                release = getattr(source, "close", None)
                if release is not None:
                    release()

    def _said(self, reading: Reading) -> Sign | None:
        """What a source itself says: an event, or that a device is gone."""
        where = reading.where
        if reading.metric == "device_lost":
            if where in self._lost:
                return None
            self._lost.add(where)
            return HealthAlarm(what=DEVICE_LOST, **where._asdict(), value=1.0, threshold=0.0)
        event = {"xid": "xid", "ecc_double_bit": "ecc"}.get(reading.metric)
        what = event or reading.metric.removeprefix(REPORTED)
        if what not in _WHAT or (event is None and not reading.metric.startswith(REPORTED)):
            return None
        source = "nvml" if event is not None or reading.text != "injected" else "injected"
        return HealthReport(what=what, code=int(reading.value), **where._asdict(), source=source)


def _all(waiting: deque[_T]) -> list[_T]:
    """Take what is there now: another thread may append meanwhile."""
    return [waiting.popleft() for _ in range(len(waiting))]


def _told(alarm: Alarm, now_s: float) -> HealthAlarm:
    return HealthAlarm(
        what=alarm.what,
        **alarm.where._asdict(),
        lasted_s=_finite(max(0.0, now_s - alarm.since_s)),
        value=_finite(alarm.value),
        threshold=_finite(alarm.threshold),
        evidence=dict(_readable(alarm.evidence.items())),
    )


def _finite(value: float) -> float:
    """The value as JSON can hold it: infinite ones as the largest that there is, none as 0."""
    if math.isnan(value):
        return 0.0
    return min(max(value, -1e308), 1e308)


def _readable(
    evidence: Iterable[tuple[str, float | int | str]],
) -> Iterable[tuple[str, float | int | str]]:
    for name, value in evidence:
        yield name, _finite(value) if isinstance(value, float) else value
