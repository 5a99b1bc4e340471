"""Nothing is committed for longer than steps take: a warning, from commits alone.

The supervisor's own detection (``recovery.detection.hangs``) sees the phases of each rank and the
kernel's view of its process, and decides; this is for whoever has commits only. Both learn the
step time and the deadline from one class (``recovery.detection.pace``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainchaos.recovery.detection.pace import HangLimits, Pace
from trainchaos.recovery.health.detectors.base import MOST_PLACES, RATE, Alarm
from trainchaos.recovery.health.readings.reading import JOB, Place, Reading

PHASE = "forward"
"""Whose deadline holds: of one that has no longer limit of its own, as a checkpoint has."""


@dataclass(kw_only=True)
class HangDetector:
    """Metric ``committed``, steps. Value: seconds since the slowest ranks' last commit; threshold:
    the learned deadline, 8 median steps or 0.6 s, whichever is longer. The alarm names the ranks
    that are behind, or the job where none is.

    Null model: steps scatter around their median by a scale of 5 % with the tail of Student's t
    with 3 degrees of freedom. Then a step of 40 ms takes more than 0.57 s with probability 6e-8
    (265 scales), in an hour 0.005 times; one of 0.25 s more than 7.8 medians with 5e-7, in an hour
    0.007 times. Pauses that the job knows of (checkpoint, evaluation) are no part of it: say so by
    ``limits``.
    """

    what: str = field(default="hang", init=False)
    rate: float = field(default=RATE, init=False)
    limits: HangLimits = field(default_factory=HangLimits)
    _at: dict[Place, tuple[float, float]] = field(default_factory=dict, repr=False)
    _lowest: tuple[float, float] | None = field(default=None, repr=False)
    _alarmed: bool = False

    def __post_init__(self) -> None:
        self.pace = Pace(limits=self.limits)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms: of silence until the latest reading or ``now_s``."""
        found: list[Alarm] = []
        for reading in readings:
            finite = math.isfinite(reading.value) and math.isfinite(reading.time_s)
            if reading.metric == "committed" and finite:
                found += self._silent(reading.time_s)
                self._commit(reading)
        return [*found, *self._silent(now_s)]

    def left(self, where: Place) -> None:
        """A rank is no longer part of the job, and not waited for."""
        self._at.pop(where, None)

    def _commit(self, reading: Reading) -> None:
        before = self._at.get(reading.where)
        if before is not None and before[0] == reading.value:
            return
        if before is None and len(self._at) >= MOST_PLACES:
            return
        self._at[reading.where] = reading.value, reading.time_s
        lowest = min(step for step, _ in self._at.values())
        if self._lowest is None or lowest < self._lowest[0]:  # began, or went back
            self._lowest = lowest, reading.time_s
        elif lowest > self._lowest[0]:
            took_s = (reading.time_s - self._lowest[1]) / (lowest - self._lowest[0])
            # A step that ended a silence is none to learn from.
            if took_s > 0.0 and not self._alarmed:
                self.pace.step_took(took_s)
            self._lowest = lowest, reading.time_s
            self._alarmed = False

    def _silent(self, now_s: float) -> list[Alarm]:
        if self._lowest is None or self._alarmed or not math.isfinite(now_s):
            return []
        step, since_s = self._lowest
        if now_s < since_s:  # the clock was set back: silence is counted from now
            self._lowest = step, now_s
            return []
        limit_s = self.pace.deadline_s(PHASE)
        if now_s - since_s <= limit_s:
            return []
        self._alarmed = True
        behind = [where for where, (at, _) in self._at.items() if at == step]
        return [
            Alarm(
                what=self.what,
                where=where,
                since_s=since_s,
                value=now_s - since_s,
                threshold=limit_s,
                evidence={"step": step, "behind": len(behind), "ranks": len(self._at)},
            )
            for where in (behind if len(behind) < len(self._at) else [JOB])
        ]
