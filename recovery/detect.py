"""Tells a hung rank from the ones that wait for it, by progress marks alone.

Pure: time and marks come in as arguments. In data-parallel training all ranks enter the same collectives in
the same order, so whoever has entered fewer than the others is what they wait for. A deadline is learned
from the job's own step times. A process that the kernel would run but has no CPU for is starved, not hung,
and gets a longer deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from types import MappingProxyType

from recovery.marks import Mark

WINDOW = 50
MAX_LOOK_S = 0.1
STARVED = ("R", "D")  # would run, or waits for a disk
STOPPED = ("T",)
TRACED = ("t",)
"""Held by a debugger or a profiler, who mean to let go of it."""
UNHEARD = "?"
"""Of a process whose node is not heard of: its mark is an old one, and says nothing about now."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Bounds of the learned deadline, seconds. ``factor``: deadline in median step times. ``stopped_s``: how long the
    kernel may show a process as stopped. That is no guess, so it is only waited for about as long as its replacement
    takes (0.07 to 0.1 s, docs/performance.md): waiting then costs about twice the best choice at the most.
    """

    floor_s: float = 0.6
    factor: float = 8.0
    stopped_s: float = 0.08
    ceiling_s: float = 600.0
    checkpoint_floor_s: float = 5.0
    starved_factor: float = 10.0
    first_step_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A process that does not move; ``""`` when all wait for each other. ``silent_s``: how long already;
    ``missed``: collectives of its step that others have entered, and it has not, though it waits in one.
    """

    process: str
    phase: str
    step: int
    collective: int
    silent_s: float
    deadline_s: float
    missed: int = 0

    @property
    def detail(self) -> str:
        """For people."""
        late = (
            "a rank waits for bytes that others have"
            if self.collective
            else "all ranks wait in one collective"
        )
        who = "" if self.process else f"{late}, "
        where = f"{self.phase} of step {self.step}"
        if self.missed:
            where += f" without entering collective {self.collective + 1}, in which the others wait"
        return f"{who}silent for {self.silent_s:.2f} s in {where}, limit {self.deadline_s:.2f} s"


@dataclass(kw_only=True)
class _Silence:
    """How long a member, with this very mark, kept others waiting, how long it was itself one who waits, and since
    when the kernel shows it as stopped.
    """

    mark: Mark
    behind_s: float = 0.0
    waited_s: float = 0.0
    stopped_s: float | None = None


@dataclass(kw_only=True)
class HangDetector:
    """Learns step times of the current world and names hung processes.

    Silence is summed over looks, each counted for at most ``MAX_LOOK_S``: what passes while the supervisor
    itself gets no CPU is nobody's silence. It counts from the moment a rank falls behind, not from its last
    mark: whoever waited long in a collective that has just ended is not late yet.
    """

    limits: HangLimits = field(default_factory=HangLimits)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last_step: int = -1
    _last_time_s: float = 0.0
    _last_look_s: float | None = None
    _silences: dict[str, _Silence] = field(default_factory=dict)

    def resumed(self) -> None:
        """A generation starts training: silence is counted from now."""
        self._last_step = -1
        self._last_look_s = None
        self._silences = {}

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

    def look(
        self, now_s: float, marks: Mapping[str, Mark], kernel: Callable[[str], str],
        replicas: Mapping[str, int] = MappingProxyType({}),
    ) -> Hang | None:  # fmt: skip
        """The worst hang among the members of a training generation that are still at work.

        ``kernel``: the kernel's letter for a process (R, S, D, T ..., ? of one that is not heard of), asked only of
        those that did not move since the last look; ``replicas``: which members hold one copy of the model together,
        where one is more than a rank: they have collectives of their own, in which they wait for each other alone. A
        hang of the process ``""`` is nobody's: all wait in one collective.
        """
        kernel = cache(kernel)
        passed = 0.0 if self._last_look_s is None else min(now_s - self._last_look_s, MAX_LOOK_S)
        self._last_look_s = now_s
        ahead: dict[int, tuple[int, int]] = {}
        for name, mark in marks.items():
            group = replicas.get(name, 0)
            ahead[group] = max(ahead.get(group, (0, 0)), (mark.step, mark.collective))
        hangs, heard = [], {}
        for name, mark in marks.items():
            furthest = ahead[replicas.get(name, 0)]
            silence = self._silences.get(name)
            if silence is None or silence.mark != mark:
                silence = self._silences[name] = _Silence(mark=mark)
            elif kernel(name) == UNHEARD:
                continue
            elif _waits(mark, furthest) and len(marks) > 1:
                silence.waited_s += passed
            else:
                silence.behind_s += passed
            heard[name] = mark
            hang = self._judge(name, silence, passed, kernel, None if len(marks) == 1 else furthest)
            if hang is not None:
                hangs.append(hang)
        worst = max(hangs, key=lambda hang: (bool(hang.process), hang.silent_s), default=None)
        return worst or self._stuck(heard, alone=len(marks) == 1)

    def _judge(
        self, name: str, silence: _Silence, passed_s: float, kernel: Callable[[str], str],
        furthest: tuple[int, int] | None,
    ) -> Hang | None:  # fmt: skip
        mark, silent = silence.mark, max(silence.behind_s, silence.waited_s)
        if not silent:
            return None
        state = kernel(name)
        stopped = state in STOPPED
        if stopped:
            silence.stopped_s = 0.0 if silence.stopped_s is None else silence.stopped_s + passed_s
            late, deadline = silence.stopped_s, self.limits.stopped_s
        else:
            # Whoever waits is to blame only if the kernel says that it would not even notice the end of its wait.
            silence.stopped_s = None
            late, deadline = silent if state in TRACED else silence.behind_s, self.deadline_s(mark.phase)
        if state in STARVED:
            deadline *= self.limits.starved_factor
        if late <= deadline:
            return None
        # Whoever sits in a collective and could notice its end waits for bytes: the others may have got theirs. If
        # it is the one that hangs, it will not leave the broken group either, and is found then. But one that has
        # not entered a collective of this very step which others have entered has left it out.
        missed = furthest[1] - mark.collective if furthest and furthest[0] == mark.step else 0
        innocent = (
            mark.phase == "collective"
            and state not in STOPPED + TRACED
            and furthest is not None
            and not missed
        )
        return Hang(
            process="" if innocent else name,
            phase=mark.phase,
            step=mark.step,
            collective=mark.collective,
            silent_s=late,
            deadline_s=deadline,
            missed=missed if mark.phase == "collective" else 0,
        )

    def _stuck(self, marks: Mapping[str, Mark], *, alone: bool) -> Hang | None:
        """All members that are heard of have waited in one collective for twice its deadline: the network's fault."""
        if alone or not marks or any(mark.phase != "collective" for mark in marks.values()):
            return None
        waited = min(self._silences[name].waited_s for name in marks)
        limit = 2 * self.deadline_s("collective")
        step = max(mark.step for mark in marks.values())
        if waited <= limit:
            return None
        return Hang(
            process="", phase="collective", step=step, collective=0, silent_s=waited, deadline_s=limit
        )


def _waits(mark: Mark, furthest: tuple[int, int]) -> bool:
    return mark.phase == "collective" and (mark.step, mark.collective) == furthest
