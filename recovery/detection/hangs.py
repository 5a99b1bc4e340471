"""Distinguishes a hung rank from the ones that wait for it, by progress marks alone.

Pure: time and marks come in as arguments. In data-parallel training all ranks enter the same
collectives in the same order, so the rank that has entered fewer than the others is the one they
wait for. Where none waits, as in a stall that all share, none hangs. ``recovery.detection.pace``
decides how long a rank may keep others waiting; time in which it wanted a CPU and got none does not
count (``recovery.process.starvation``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from trainchaos.recovery.detection.pace import HangLimits, Pace
from trainchaos.recovery.detection.silence import PollTime, Silence
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import Mark

__all__ = ["STALLS", "STOPPED", "Hang", "HangDetector", "HangLimits"]

T = TypeVar("T")

STALLS = "data"  # the phase that depends on what ranks share
DISK = "D"  # in the kernel, waiting for a device
STOPPED = ("T",)
SUSPECT_AT = 0.5  # of the limit: leaves the rest for a dump of its stacks
TRACED = ("t",)
"""Held by a debugger or a profiler, which will release it."""
UNHEARD = "?"
"""Of a process on a silent node: its mark is an old one, and says nothing about now."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A process that does not move; ``""`` when all wait for each other. ``silent_s``: how long
    already; ``missed``: collectives of its step that others have entered, and it has not, though it
    waits in one; ``left_out``: the collective that it has not begun, for people, where its own
    answer or RAS tells it; ``last_seq``: the last event it had noted before; ``stopped``: the
    kernel showed it as stopped, for so long; ``ras``: what NCCL's RAS says of it, for people.
    """

    process: str
    phase: str
    step: int
    collective: int
    silent_s: float
    deadline_s: float
    missed: int = 0
    left_out: str = ""
    busy: bool = False
    last_seq: int = -1
    stopped: bool = False
    ras: str = ""

    @property
    def measured(self) -> dict[str, Any]:
        """For the record: lets others check whether it can have been silent for so long."""
        measured = measured_of(self.silent_s, self.deadline_s, self.last_seq, stopped=self.stopped)
        return {**measured, "ras": self.ras} if self.ras else measured

    @property
    def detail(self) -> str:
        """For people."""
        late = (
            "a rank waits for bytes that others have"
            if self.collective
            else "all ranks wait in one collective"
        )
        if self.phase != "collective":
            late = "no rank makes progress"
        who = "" if self.process else f"{late}, "
        where = f"{self.phase} of step {self.step}"
        if self.phase == "between":
            where = f"code of the script's between steps, after step {self.step}"
        if self.busy:
            where += ", where it said that it is busy"
        if self.missed:
            where += f" without entering collective {self.collective + 1}, in which the others wait"
        if self.left_out:
            where += f" without entering {self.left_out}, in which others wait"
        return f"{who}silent for {self.silent_s:.2f} s in {where}, limit {self.deadline_s:.2f} s"


def _still(_: str = "") -> Pulse:
    return Pulse()


@dataclass(kw_only=True)
class HangDetector:
    """Learns step times of the current world and names hung processes.

    Silence is summed over looks (``recovery.detection.silence``). It counts from the moment a rank
    falls behind others that wait, not from its last mark: one that waited long in a collective that
    has just ended is not late yet, and of a stall that all share the last to come out of it has as
    long again as it was shared.
    """

    limits: HangLimits = field(default_factory=HangLimits)
    due_s: float = math.inf
    """Seconds until the next process is late, if it does not move before."""
    suspects: set[str] = field(default_factory=set)
    """Who was silent for ``SUSPECT_AT`` of its limit or longer at the last look, or is stopped."""
    _last_step: int = -1
    _last_time_s: float = 0.0
    _last_look_s: float | None = None
    _silences: dict[str, Silence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pace = Pace(limits=self.limits)

    def resumed(self, members: Collection[str]) -> None:
        """A generation of these processes starts training: silence is counted from now."""
        self._last_step = -1
        self._last_look_s, self.due_s = None, math.inf
        self._silences = {}
        self.pace.resumed(members)

    def deadline_s(self, phase: str) -> float:
        """How long a rank may be silent in a phase."""
        return self.pace.deadline_s(phase)

    def observe(self, now_s: float, committed: int, moved_s: Iterable[float] = ()) -> None:
        """Learn from the slowest member's committed step. ``moved_s``: when each member began what
        it does now: the step was done by then. Without it a step would be known to a look, and
        eight steps to eight looks.
        """
        if committed <= self._last_step:
            return
        before_s = now_s if self._last_look_s is None else self._last_look_s
        done_s = min((time_s for time_s in moved_s if before_s <= time_s <= now_s), default=now_s)
        if self._last_step >= 0:
            self.pace.step_took((done_s - self._last_time_s) / (committed - self._last_step))
        self._last_step, self._last_time_s = committed, done_s

    def look(
        self,
        now_s: float,
        marks: Mapping[str, Mark],
        kernel: Callable[[str], str],
        replicas: Mapping[str, int] = MappingProxyType({}),
        *,
        pulse: Callable[[str], Pulse] = _still,
        others_done: bool = False,
    ) -> Hang | None:
        """The worst hang among the members of a training generation that are still at work.

        ``kernel``: the kernel's letter for a process (R, S, D, T ..., ? of one that is not heard
        of), asked only of those that did not move since the last look; ``replicas``: which members
        hold one copy of the model together, where one is more than a rank: they have collectives of
        their own, in which they wait for each other alone; ``pulse``: what a process gets of the
        processors, asked only of those that are silent for long; ``others_done``: some have done
        their last step. The process ``""``: none can be blamed.
        """
        look = PollTime.after(self._last_look_s, now_s, len(marks))
        self._last_look_s, self.due_s = now_s, math.inf
        self.suspects.clear()
        places = {(mark.step, mark.collective, mark.phase) for mark in marks.values()}
        ahead = _furthest(marks, places, replicas)
        phases = {phase for _, _, phase in places}
        alone = len(marks) == 1
        awaited = alone or others_done or "collective" in phases
        common = STALLS in phases and self._common_stall(marks)
        stuck = partial(_once(lambda _: _all_wait(marks, kernel)), "")
        hangs, heard, silences = [], {}, self._silences
        for name, mark in marks.items():
            # Most have moved, or are not heard of, and each of many thousands costs little.
            silence = silences.get(name)
            if silence is None or (silence.mark is not mark and _differ(silence.mark, mark)):
                self._moved(name, mark, silence)
                heard[name] = mark
                continue
            state = kernel(name)
            if state == UNHEARD:
                continue
            heard[name] = mark
            furthest = ahead[replicas.get(name, 0)]
            deadline = self._deadline_s(name, silence)
            # Others who are two steps on have the rank's part of the step between: it works, and
            # its marks are lost.
            if _waits(mark, furthest) and not alone:
                silence.waits(look, deadline, partial(pulse, name), stuck)
            elif furthest[0] > mark.step + 1 or (awaited and not (common and mark.phase == STALLS)):
                silence.lags(look, deadline, partial(pulse, name), self.pace.works)
            else:
                silence.shared_s += look.passed_s
                silence.common_s += look.passed_s if awaited else 0.0
            hang = self._judge(
                name, silence, look.passed_s, state, None if alone else furthest, deadline
            )
            if hang is not None:
                hangs.append(hang)
        worst = max(hangs, key=lambda hang: (bool(hang.process), hang.silent_s), default=None)
        return worst or self._stuck(heard, alone=alone)

    def _common_stall(self, marks: Mapping[str, Mark]) -> bool:
        """Whether half of the members or more wait for data at once: their source is slow, and none
        of them hangs.
        """
        still = [
            name
            for name, mark in marks.items()
            if mark.phase == STALLS
            and not mark.busy_s
            and (silence := self._silences.get(name)) is not None
            and (silence.mark is mark or silence.mark == mark)
        ]
        return len(still) >= max(2, len(marks) / 2)

    def _moved(self, name: str, mark: Mark, before: Silence | None) -> None:
        """A member has moved since the last look. ``before``: its silence until then."""
        self.pace.saw(name, mark)
        if before is not None and before.untouched:
            before.mark = mark
            return
        if before is not None:
            alone_s = before.behind_s
            self.pace.ended(name, before.mark, alone_s=alone_s, all_s=alone_s + before.shared_s)
        self._silences[name] = Silence(mark=mark)

    def _deadline_s(self, name: str, silence: Silence) -> float:
        if silence.mark.busy_s:
            return silence.mark.busy_s + self.limits.late_s
        deadline = self.pace.deadline_s(silence.mark.phase, name)
        return deadline if self.limits.given_s is not None else max(deadline, silence.shared_s)

    def _judge(
        self,
        name: str,
        silence: Silence,
        passed_s: float,
        state: str,
        furthest: tuple[int, int] | None,
        deadline: float,
    ) -> Hang | None:
        mark = silence.mark
        if not max(silence.behind_s, silence.waited_s, silence.shared_s):
            return None
        late, limit = self._lateness(silence, state, passed_s, deadline)
        missed = furthest[1] - mark.collective if furthest and furthest[0] == mark.step else 0
        held = state in STOPPED + TRACED
        in_collective = mark.phase == "collective" and not held and furthest is not None
        waits = in_collective and not missed
        if waits:
            limit = self.pace.patient_s(limit)
        if state in STOPPED or (late > SUSPECT_AT * limit and not held):
            self.suspects.add(name)  # one that is stopped has a short limit
        if late <= limit:
            self.due_s = min(self.due_s, limit - late) if late else self.due_s
            return None
        # One that sits in a collective and could notice its end waits for bytes: the others may
        # have got theirs. If it is the one that hangs, it will not leave the broken group either,
        # and is found then. But one that has not entered a collective of this very step which
        # others have entered has left it out. A stall that was shared for most of its time has no
        # culprit: one that does not leave the group then is found.
        if waits:
            self.pace.stuck()
        shared = not held and silence.shared_s > silence.behind_s
        return Hang(
            process="" if waits or shared else name,
            phase=mark.phase,
            step=mark.step,
            collective=mark.collective,
            silent_s=late,
            deadline_s=limit,
            missed=missed if mark.phase == "collective" else 0,
            busy=bool(mark.busy_s),
            last_seq=mark.last_seq,
            stopped=state in STOPPED,
        )

    def _lateness(
        self, silence: Silence, state: str, passed_s: float, limit_s: float
    ) -> tuple[float, float]:
        """For how long a process is late that is in this ``state`` of the kernel, and how long it
        may be: ``limit_s``, unless it is stopped, waits for a disk, or most were silent with it.
        """
        disk = self.limits.disk_factor if state == DISK else 1.0
        if state in STOPPED:
            silence.stopped_s = 0.0 if silence.stopped_s is None else silence.stopped_s + passed_s
            return silence.stopped_s, self.limits.stopped_s
        silence.stopped_s = None
        # One that waits is to blame only if the kernel says that it would not even notice the end
        # of its wait.
        late = max(silence.behind_s, silence.waited_s) if state in TRACED else silence.behind_s
        if silence.mark.busy_s or self.limits.given_s is not None:
            late += silence.shared_s
        elif silence.common_s > self.limits.between_s:
            return silence.common_s, disk * self.limits.between_s
        elif late and silence.shared_s <= 2 * self.pace.step_s:
            # While the others did their part of the step it was silent too, and had no more to do
            # than they. They may take longer than usual for it: one that spins is in their way.
            late += silence.shared_s
        return late, disk * limit_s

    def _stuck(self, marks: Mapping[str, Mark], *, alone: bool) -> Hang | None:
        """All members on reachable nodes have waited in one collective for too long: the network's
        fault.
        """
        if alone or not marks or any(mark.phase != "collective" for mark in marks.values()):
            return None
        waited = min(self._silences[name].waited_s for name in marks)
        limit = self.pace.patient_s(2 * self.deadline_s("collective"))
        step = max(mark.step for mark in marks.values())
        self.suspects.update(marks if waited > SUSPECT_AT * limit else ())
        if waited <= limit:
            return None
        self.pace.stuck()
        return Hang(
            process="",
            phase="collective",
            step=step,
            collective=0,
            silent_s=waited,
            deadline_s=limit,
        )


def measured_of(
    silent_s: float, limit_s: float, last_seq: int, *, stopped: bool = False
) -> dict[str, Any]:
    """The measurements of a silence, for the record."""
    more = {"stopped": True} if stopped else {}
    return {
        "silent_s": round(silent_s, 6),
        "limit_s": round(limit_s, 6),
        "last_seq": last_seq,
        **more,
    }


def _once(ask: Callable[[str], T]) -> Callable[[str], T]:
    """Caches each answer. Made in every look, for which functools.cache is too slow."""
    known: dict[str, T] = {}

    def asked(name: str) -> T:
        if name not in known:
            known[name] = ask(name)
        return known[name]

    return asked


def _all_wait(marks: Mapping[str, Mark], kernel: Callable[[str], str]) -> bool:
    """Whether all members on reachable nodes wait in a collective."""
    return all(
        mark.phase == "collective" or kernel(name) == UNHEARD for name, mark in marks.items()
    )


def _differ(one: Mark, other: Mark) -> bool:
    """Whether two marks are not equal; their times, which differ as a rule, tell it soonest."""
    return one.time_ns != other.time_ns or one != other


def _furthest(
    marks: Mapping[str, Mark],
    places: Collection[tuple[int, int, str]],
    replicas: Mapping[str, int],
) -> dict[int, tuple[int, int]]:
    """Step and collective of the furthest member of each replica. ``places``: step, collective and
    phase of all of them; far fewer than members, as ranks keep step.
    """
    if not replicas:
        return {0: max(((step, collective) for step, collective, _ in places), default=(0, 0))}
    ahead: dict[int, tuple[int, int]] = {}
    for name, mark in marks.items():
        group = replicas.get(name, 0)
        ahead[group] = max(ahead.get(group, (0, 0)), (mark.step, mark.collective))
    return ahead


def _waits(mark: Mark, furthest: tuple[int, int]) -> bool:
    return mark.phase == "collective" and (mark.step, mark.collective) == furthest


@dataclass(kw_only=True)
class LeaveWatch:
    """Which members of an aborted generation do not leave it. Each has as long as its phase may
    take, from its last sign of life on; see ``Pace.leave_s``.
    """

    pace: Pace
    least_s: float
    suspects: set[str] = field(default_factory=set)
    """As in ``HangDetector``."""
    _last_look_s: float | None = None
    _silences: dict[str, Silence] = field(default_factory=dict)

    def late(
        self,
        now_s: float,
        marks: Mapping[str, Mark],
        kernel: Callable[[str], str],
        pulse: Callable[[str], Pulse],
    ) -> dict[str, dict[str, Any]]:
        """Members that are late by now, and the measurements of each (``Hang.measured``). Arguments
        as for ``HangDetector.look``.
        """
        look = PollTime.after(self._last_look_s, now_s, len(marks))
        self._last_look_s = now_s
        self.suspects.clear()
        late = {}
        for name, mark in marks.items():
            silence = self._silences.get(name)
            # A member on a silent node may have left; its node comes back and reports it, or is
            # given up.
            if silence is None or silence.mark != mark or kernel(name) == UNHEARD:
                self._silences[name] = Silence(mark=mark)
                continue
            limit = self.pace.leave_s(mark, name, self.least_s)
            silence.lags(look, limit, partial(pulse, name), self.pace.works)
            state = kernel(name)
            if state in STOPPED:
                limit = self.least_s
            elif state == DISK:
                limit *= self.pace.limits.disk_factor
            if silence.behind_s > SUSPECT_AT * limit:
                self.suspects.add(name)
            if silence.behind_s > limit:
                late[name] = measured_of(silence.behind_s, limit, mark.last_seq)
        return late
