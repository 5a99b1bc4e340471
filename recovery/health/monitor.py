"""Reads health sources at a period, and measures its own cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainchaos.recovery.health.readings.reading import (
    HealthSource,
    Problem,
    Problems,
    Reading,
)

PERIOD_S = 1.0
"""Between two reads. NVML averages utilisation over 1/6 to 1 s, depending on the device (NVML API
reference, nvmlUtilization_t), and a read of host, job and reports costs 0.2 to 0.4 ms: 0.1 % of the
time is 1 ms (docs/health.md).
"""


@dataclass(kw_only=True)
class Cost:
    """Of reading, in seconds of the reading thread: ``total_s`` of ``reads``, ``worst_s`` of one.
    ``by_source``: source -> its part.
    """

    reads: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0
    by_source: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Monitor:
    """``poll`` it as often as you like; it reads when a read is due. A source that raises, which it
    should not, becomes a problem, and the others are read.
    """

    sources: Sequence[HealthSource]
    period_s: float = PERIOD_S
    clock_s: Callable[[], float] = time.perf_counter
    cost: Cost = field(default_factory=Cost)
    _last_s: float | None = None

    def __post_init__(self) -> None:
        if not self.period_s > 0:
            raise ValueError("a period is more than 0 s")
        self._problems = Problems("monitor")
        self._new: list[Problem] = []

    def poll(self, now_s: float) -> Sequence[Reading]:
        """The readings of all sources, if a read is due at ``now_s``. After a clock that jumped
        back, one is due at once.
        """
        if self._last_s is not None and 0 <= now_s - self._last_s < self.period_s:
            return []
        self._last_s = now_s
        found: list[Reading] = []
        began_s = before_s = self.clock_s()
        for source in self.sources:
            try:
                found += source.read(now_s)
                self._new += source.problems()
            except Exception as error:  # a source of somebody else's
                self._problems.note(source.name, "", error)
            after_s = self.clock_s()
            by = self.cost.by_source
            by[source.name] = by.get(source.name, 0.0) + after_s - before_s
            before_s = after_s
        took_s = self.clock_s() - began_s
        self.cost.reads += 1
        self.cost.total_s += took_s
        self.cost.worst_s = max(self.cost.worst_s, took_s)
        return found

    def problems(self) -> Sequence[Problem]:
        """Those of all sources that are new since the last call."""
        new, self._new = [*self._new, *self._problems.take()], []
        return new
