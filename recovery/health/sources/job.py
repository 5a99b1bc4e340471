"""What the ranks of the job say of their own steps; fed by whoever hears them.

A supervisor without events has a rank's progress mark only (``JobSource.marked``); whoever reads
the event log has the times, loss and gradient norm of each step (``JobSource.committed``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from trainchaos.recovery.health.readings.reading import Place, Problem, Problems, Reading
from trainchaos.recovery.transport.progress_counters import Mark

MOST_HELD = 100_000
"""Readings held until they are read: 512 ranks with 8 each at 40 ms a step make as many in a
second.
"""
OWN = ("forward", "backward", "optimizer")
"""Phases in which a rank computes, and waits for no other."""
NS = 1e9


class JobSource:
    """Readings of each rank: ``compute`` (its own: forward, backward, optimizer), ``collective``
    and ``data_wait`` in s; ``loss``, ``gradient_norm``, ``throughput`` (samples/s); ``committed``
    (steps) and ``digest`` (its text).
    """

    name = "job"

    def __init__(self, most: int = MOST_HELD) -> None:
        self._held: deque[Reading] = deque(maxlen=most)
        self._problems = Problems(self.name)
        self._places: dict[int, Place] = {}
        self._last: dict[int, tuple[int, float]] = {}

    def feed(
        self,
        rank: int | None,
        metric: str,
        value: float,
        unit: str,
        time_s: float,
        step: int | None = None,
        text: str = "",
    ) -> None:
        """One value. ``rank`` None: of the job as a whole."""
        if len(self._held) == self._held.maxlen:
            self._problems.note("dropped", "", f"more than {self._held.maxlen} wait to be read")
        where = Place(rank) if rank is None else self._places.setdefault(rank, Place(rank))
        self._held.append(Reading(where, metric, value, unit, time_s, step, text))

    def committed(self, data: Mapping[str, Any], step: int, time_s: float) -> None:
        """A ``step_committed`` event's data. What is missing or no number is left out, and said
        once.
        """
        rank = data.get("rank")
        if type(rank) is not int:
            self._problems.note("committed", "", f"a step of rank {rank!r}")
            return
        self.feed(rank, "committed", float(step), "steps", time_s, step)
        seconds = data.get("seconds")
        took = seconds if isinstance(seconds, Mapping) else {}
        own = [self._number(took, phase, rank) for phase in OWN]
        values: list[tuple[str, float | None, str]] = [
            ("compute", sum(one for one in own if one is not None) if any(own) else None, "s"),
            ("collective", self._number(took, "collective", rank), "s"),
            ("data_wait", self._number(took, "data", rank), "s"),
            ("loss", self._number(data, "loss", rank), "1"),
            ("gradient_norm", self._number(data, "grad_norm", rank), "1"),
            ("throughput", self._throughput(data, rank, step, time_s), "samples/s"),
        ]
        for metric, value, unit in values:
            if value is not None:
                self.feed(rank, metric, value, unit, time_s, step)

    def marked(self, rank: int, mark: Mark) -> None:
        """A rank's progress mark: the steps that it has committed, at the time of its last
        change.
        """
        self.feed(rank, "committed", float(mark.committed), "steps", mark.time_ns / NS, mark.step)

    def read(self, now_s: float) -> Sequence[Reading]:
        """All that was fed since the last call."""
        held = list(self._held)
        self._held.clear()
        return held

    def problems(self) -> Sequence[Problem]:
        """New problems."""
        return self._problems.take()

    def _throughput(
        self, data: Mapping[str, Any], rank: int, step: int, time_s: float
    ) -> float | None:
        """From the step before to this one; None for a first step, or one that is done again."""
        before = self._last.get(rank)
        self._last[rank] = step, time_s
        samples = self._number(data, "samples", rank)
        if samples is None or before is None or step != before[0] + 1 or time_s <= before[1]:
            return None
        return samples / (time_s - before[1])

    def _number(self, data: Mapping[str, Any], key: str, rank: int) -> float | None:
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._problems.note(key, f"rank {rank}", f"{value!r} is no number")
            return None
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
