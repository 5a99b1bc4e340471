"""How long a process was ready to run and got no CPU: tells a process that works slowly from one
that does not work.

The kernel counts for each thread how long it ran and how long it stood in a run queue
(/proc/PID/task/TID/schedstat). A thread that is in the queue now is not in that count yet: it is
ready to run, and does not. A wait that is learned only when it is over is entered in the intervals
between readings in which it passed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.recovery.process.processes import everybody

LOOK_S = 0.03
"""Shortest interval between two readings: the kernel updates how long a running thread ran with its
clock tick, 10 ms at most.
"""
WORK_EVERY_S = 1.0
WORKS = 0.5
"""Of a core: less is mere polling."""
OTHERS_SHARE = 0.75
"""Of the time in which the main thread sleeps and another thread is in a queue: most of what counts
as work goes on in that other thread, but some threads only wake up to poll, so that a deadlock must
not be excused for ever.
"""
NOBODY = 0
"""In place of a thread: figures known of the machine only."""
PRESSURE = Path("/proc/pressure/cpu")
NS = 1e9


@dataclass(frozen=True)
class Pulse:
    """How much CPU time a process got. ``starved_s``: for how long it was ready to run and got
    none, since the first reading; ``working``: it and its children, such as compilers, use half a
    core or more.
    """

    starved_s: float = 0.0
    working: bool = False


@dataclass(frozen=True, kw_only=True)
class ThreadReading:
    """One reading. ``ready``: it runs or would run; times in seconds since it began."""

    ready: bool
    ran_s: float
    queued_s: float


@dataclass(kw_only=True)
class _Interval:
    """The time between two readings, and how long of it each thread was in a queue. The figure only
    grows: time that two threads waited together counts once, whenever it is learned.
    """

    passed_s: float
    held: dict[int, float] = field(default_factory=dict)
    others_s: float = 0.0  # the longest of all but the main thread

    def starved_s(self, main: int) -> float:
        return min(self.passed_s, max(self.held.get(main, 0.0), OTHERS_SHARE * self.others_s))


@dataclass(kw_only=True)
class _Wait:
    """A thread that may have been in a queue since some moment of an interval. ``ahead_s``: of
    whole intervals after that one, counted before the kernel did.
    """

    began: _Interval
    ahead_s: float = 0.0


class Starvation:
    """Starvation of one process, updated with each reading."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._seen: dict[int, ThreadReading] = {}
        self._waits: dict[int, _Wait] = {}
        self._main = 0
        self._last_s: float | None = None
        self._used_s: float | None = None
        self._worked_at_s = float("-inf")
        self._working = False
        self._pressure_s = 0.0

    def pulse(self) -> Pulse:
        return Pulse(starved_s=round(self.total_s, 3), working=self._working)

    def taken(self, now_s: float, pid: int, usage: Usage) -> Pulse:
        """Take a reading, if it would add anything. ``pid``: of the process, which leads a session
        of its own; ``usage``: shared by all processes under observation.
        """
        if self._last_s is None or now_s - self._last_s >= LOOK_S:
            self.look(now_s, pid, threads_of(pid), pressure_s())
        if now_s - self._worked_at_s >= WORK_EVERY_S:
            looked_s, used_s = usage.of(pid, now_s)
            if looked_s > self._worked_at_s:
                self.worked(looked_s, used_s)
        return self.pulse()

    def worked(self, now_s: float, used_s: float) -> None:
        """Whether it has used that much CPU time in all its life, its children included."""
        # a child that ends takes its time with it
        known = self._used_s is not None and used_s >= self._used_s
        if known and self._used_s is not None:
            self._working = used_s - self._used_s >= WORKS * (now_s - self._worked_at_s)
        self._used_s, self._worked_at_s = used_s, now_s

    def look(
        self, now_s: float, main: int, threads: Mapping[int, ThreadReading], pressure_s: float = 0.0
    ) -> None:
        """Add what passed since the last reading. ``main``: the thread that trains; ``pressure_s``:
        of the machine, used where nothing is known of threads.
        """
        self._main = main
        # Any time may have passed before the first reading: a wait that is found then began within
        # it.
        interval = _Interval(passed_s=math.inf if self._last_s is None else now_s - self._last_s)
        for tid, thread in threads.items():
            self._note(tid, thread, interval)
        if threads:
            self._seen = dict(threads)
            self._waits = {tid: wait for tid, wait in self._waits.items() if tid in threads}
        elif self._last_s is not None:
            self._hold(interval, NOBODY, pressure_s - self._pressure_s)
        self._last_s, self._pressure_s = now_s, pressure_s

    def _note(self, tid: int, thread: ThreadReading, interval: _Interval) -> None:
        before, wait = self._seen.get(tid), self._waits.get(tid)
        ahead_s = 0.0
        if before is not None and wait is not None:
            queued_s = thread.queued_s - before.queued_s
            # it was in the queue all the time
            if before.ready and thread.ready and thread.ran_s == before.ran_s:
                wait.ahead_s += self._hold(interval, tid, interval.passed_s)
                if queued_s <= 0:
                    return
                ahead_s = max(0.0, wait.ahead_s - queued_s)
            late_s = queued_s - wait.ahead_s
            # earlier intervals first, so that there is always room for what is learned next
            if before.ready:
                late_s -= self._hold(wait.began, tid, late_s)
            self._hold(interval, tid, late_s)
        self._waits[tid] = _Wait(began=interval, ahead_s=ahead_s)

    def _hold(self, interval: _Interval, tid: int, seconds: float) -> float:
        """Enter a wait in an interval; returns how much of it fitted."""
        held = interval.held.get(tid, 0.0)
        added = max(0.0, min(seconds, interval.passed_s - held))
        if added:
            before_s = interval.starved_s(self._main)
            interval.held[tid] = held + added
            if tid != self._main:
                interval.others_s = max(interval.others_s, held + added)
            self.total_s += interval.starved_s(self._main) - before_s
        return added


def threads_of(pid: int) -> dict[int, ThreadReading]:
    """The threads of a process; none where the kernel does not count, or the process has exited."""
    found: dict[int, ThreadReading] = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError, IndexError):  # it may exit during the read
                base = Path(f"/proc/{pid}/task/{name}")
                ran, queued, _ = (base / "schedstat").read_text().split()
                text = (base / "stat").read_text()
                letter = text[text.rfind(")") + 2]
                found[int(name)] = ThreadReading(
                    ready=letter == "R", ran_s=int(ran) / NS, queued_s=int(queued) / NS
                )
    return found


class Usage:
    """CPU time of sessions. One scan of all processes serves every caller for a while: on a busy
    machine a scan takes long, and an agent with many processes would do nothing else.
    """

    def __init__(self) -> None:
        self._looked_s = float("-inf")
        self._used_s: dict[int, float] = {}

    def of(self, session: int, now_s: float) -> tuple[float, float]:
        """Time of the scan, and what the processes of a session had used by then, with the children
        they waited for.
        """
        if now_s - self._looked_s >= WORK_EVERY_S:
            self._looked_s, self._used_s = now_s, processor_s()
        return self._looked_s, self._used_s.get(session, 0.0)


def processor_s() -> dict[int, float]:
    """CPU time of all processes of each session so far, and of the children they have waited
    for.
    """
    used: dict[int, float] = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for _, fields in everybody():
        session = int(fields[3])
        used[session] = used.get(session, 0.0) + tick_s * sum(map(int, fields[11:15]))
    return used


def pressure_s() -> float:
    """Total seconds in which some process of this machine wanted a CPU and had none, since boot; 0
    where the kernel does not say.
    """
    with suppress(OSError, ValueError):
        return int(PRESSURE.read_text().split("total=", 1)[1].split(None, 1)[0]) / 1e6
    return 0.0
