"""Tells a hung rank from the ones that wait for it, by progress marks alone. Pure: time and marks come in as arguments.

In data-parallel training all ranks enter the same collectives in the same order, so whoever has entered fewer than the others
is what they wait for. A deadline is learned from the job's own step times. A process that the kernel would run but has no
CPU for is starved, not hung, and gets a longer deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from recovery.marks import Mark

WINDOW = 50


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Bounds of the learned deadline, seconds. ``factor``: deadline in median step times."""

    floor_s: float = 0.6
    factor: float = 8.0
    ceiling_s: float = 600.0
    checkpoint_floor_s: float = 5.0
    starved_factor: float = 10.0
    first_step_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A process that does not move; ``""`` when all wait for each other. ``silent_s``: time since its last mark."""

    process: str
    phase: str
    step: int
    collective: int
    silent_s: float
    deadline_s: float

    @property
    def detail(self) -> str:
        """For people."""
        who = "" if self.process else "all ranks wait in one collective, "
        where = f"{self.phase} of step {self.step}"
        return f"{who}silent for {self.silent_s:.2f} s in {where}, limit {self.deadline_s:.2f} s"


@dataclass(kw_only=True)
class HangDetector:
    """Learns step times of the current world and names hung processes."""

    limits: HangLimits = field(default_factory=HangLimits)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last_step: int = -1
    _last_time_s: float = 0.0
    _resume_s: float = 0.0

    def resumed(self, now_s: float) -> None:
        """A generation starts training: silence is counted from now."""
        self._resume_s = now_s
        self._last_step = -1

    def deadline_s(self, phase: str) -> float:
        """How long a rank may be silent in a phase."""
        limits = self.limits
        if not self._durations:
            return limits.first_step_s
        floor = limits.checkpoint_floor_s if phase == "checkpoint" else limits.floor_s
        return min(limits.ceiling_s, max(floor, limits.factor * median(self._durations)))

    def observe(self, now_s: float, committed: int) -> None:
        """Learn from the slowest member's committed step."""
        if self._last_step >= 0 and committed > self._last_step:
            self._durations.append((now_s - self._last_time_s) / (committed - self._last_step))
        if committed > self._last_step:
            self._last_step, self._last_time_s = committed, now_s

    def check(self, now_s: float, marks: Mapping[str, Mark], starved: Mapping[str, bool]) -> list[Hang]:
        """Hung processes among the members of a training generation, the worst first."""
        if not marks:
            return []
        furthest = max((mark.step, mark.collective) for mark in marks.values())
        hangs = []
        for name, mark in marks.items():
            waiting = (
                mark.phase == "collective" and (mark.step, mark.collective) == furthest and len(marks) > 1
            )
            idle = mark.phase == "idle"
            if waiting or idle:
                continue
            silent = now_s - max(mark.time_ns / 1e9, self._resume_s)
            deadline = self.deadline_s(mark.phase) * (
                self.limits.starved_factor if starved.get(name) else 1.0
            )
            if silent > deadline:
                hangs.append(
                    Hang(
                        process=name,
                        phase=mark.phase,
                        step=mark.step,
                        collective=mark.collective,
                        silent_s=silent,
                        deadline_s=deadline,
                    )  # fmt: skip
                )
        return sorted(hangs, key=lambda hang: -hang.silent_s)

    def stuck(self, now_s: float, marks: Mapping[str, Mark]) -> float | None:
        """Seconds that *all* members have waited in one collective, if past the deadline: the network's fault."""
        if len(marks) < 2 or any(mark.phase != "collective" for mark in marks.values()):
            return None
        silent = now_s - max(self._resume_s, *(mark.time_ns / 1e9 for mark in marks.values()))
        return silent if silent > 2 * self.deadline_s("collective") else None
