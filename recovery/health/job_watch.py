"""The detectors of a job's own readings, as its supervisor runs them.

They begin anew with each generation: its ranks, their number and the step that it resumes from
change what is usual. Their alarms tell a person, and move nothing
(``recovery.health.signs.announced``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from trainchaos.recovery.detection.pace import HangLimits
from trainchaos.recovery.health.detector import RATE, STEP_S, Alarm, Detector
from trainchaos.recovery.health.estimates import median
from trainchaos.recovery.health.job_detectors import (
    DigestDetector,
    HangDetector,
    StragglerDetector,
    ThroughputDetector,
    gradient_spike,
    loss_spike,
)
from trainchaos.recovery.health.rank_logs import HOLD_S, RankLogs
from trainchaos.recovery.health.readings import Place, Reading
from trainchaos.recovery.health.service import HealthService

LEARNED = 12
"""Reads of a rank from which the step time is learned, each the mean of the steps of a second."""
SHORTEST_S = 0.001
SLACK = 2.0
"""Detectors that decide at each step are told of half of the learned step time: steps become
shorter once a job is warm, and more decisions in an hour than said make more false alarms. Those
that decide once in a block of time make no more decisions then.
"""
SILENCE = HangLimits(floor_s=5.0, factor=50.0)
"""The supervisor itself declares a hang after 8 steps or 0.6 s, and acts; this one speaks where it
was told to wait for longer (``timeouts.hang``), and after pauses that no checkpoint needs
(``HangLimits.checkpoint_floor_s``).
"""


class JobDetectors:
    """All detectors of the job, as one ``Detector``. ``shards``: ranks that hold one copy of the
    model together; ``steps``: of the job, after the last of which silence means nothing (0: not
    known).
    """

    what = "job"
    rate = RATE

    def __init__(self, *, shards: int = 1, steps: int = 0) -> None:
        self.steps = steps
        self._shards = max(1, shards)
        self._begin()

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms. ``now_s``: of the reader, whose readings are ``HOLD_S`` old."""
        found: list[Alarm] = []
        part: list[Reading] = []
        for reading in readings:
            if reading.metric == "generation":
                found += self._judge(part, reading.time_s)
                part = []
                self._begin()
            else:
                part.append(reading)
        return [*found, *self._judge(part, now_s - HOLD_S)]

    def _begin(self) -> None:
        self._detectors: list[Detector] = []
        self._early: list[Reading] = []
        self._took: deque[float] = deque(maxlen=LEARNED)
        self._last: dict[Place, tuple[int, float]] = {}
        self._digests = DigestDetector(shard_of=lambda rank: rank % self._shards)
        self._hang = HangDetector(limits=SILENCE)
        self._busy: set[Place] = set()

    def _judge(self, readings: Sequence[Reading], now_s: float) -> list[Alarm]:
        found = [*self._digests.look(readings, now_s), *self._silence(readings, now_s)]
        if not self._detectors:
            self._learn(readings)
            self._early += readings
            if len(self._took) < LEARNED:
                return found
            step_s = max(SHORTEST_S, median(self._took))
            often_s = min(STEP_S, step_s / SLACK)
            self._detectors = [
                StragglerDetector(step_s=step_s),
                ThroughputDetector(step_s=step_s),
                gradient_spike(often_s),
                loss_spike(often_s),
            ]
            readings, self._early = self._early, []
        for detector in self._detectors:
            found += detector.look(readings, now_s)
        return found

    def _learn(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            if reading.metric != "committed" or reading.step is None:
                continue
            before = self._last.get(reading.where)
            self._last[reading.where] = reading.step, reading.time_s
            if before is not None and reading.step > before[0]:
                took_s = (reading.time_s - before[1]) / (reading.step - before[0])
                if took_s > 0.0 and math.isfinite(took_s):
                    self._took.append(took_s)

    def _silence(self, readings: Sequence[Reading], now_s: float) -> list[Alarm]:
        """After a silence that a rank explained, and the job's end, there is none to learn from."""
        found: list[Alarm] = []
        over = False
        for reading in readings:
            if reading.metric == "busy" and reading.value > 0.0:
                self._busy.add(reading.where)
            elif reading.metric == "busy" and reading.where in self._busy:
                self._busy.discard(reading.where)
                self._hang = self._hang if self._busy else HangDetector(limits=SILENCE)
            elif reading.metric == "committed":
                over |= 0 < self.steps <= (reading.step or 0)
                if not self._busy:
                    found += self._hang.look([reading], reading.time_s)
        if over:
            self._busy = {Place()}  # for good: nothing is committed any more
        return found if self._busy else [*found, *self._hang.look([], now_s)]


def job_service(
    events: Path,
    *,
    shards: int = 1,
    steps: int = 0,
    clock_s: Callable[[], float],
) -> tuple[HealthService, JobDetectors]:
    """A service that is not started yet, and its detectors, which may be told of ``steps`` later.
    ``events``: the directory of the ranks' event logs; ``shards``, ``steps``: as for
    ``JobDetectors``; ``clock_s``: the clock of those logs.
    """
    detectors = JobDetectors(shards=shards, steps=steps)
    return HealthService([RankLogs(events)], [detectors], clock_s=clock_s), detectors
