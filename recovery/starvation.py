"""How long a process was kept from running by others: what tells one that works slowly from one that does not work.

The kernel counts for each thread how long it ran and how long it stood in a run queue (/proc/PID/task/TID/schedstat).
A thread that stands there now is not in that count yet: it is ready to run, and does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recovery.processes import everybody

LOOK_S = 0.03
"""Between two looks at least: the kernel updates how long a running thread ran with its clock tick, 10 ms at most."""
WORK_EVERY_S = 1.0
WORKS = 0.5
"""Of a core: less is looking around."""
OTHERS_SHARE = 0.75
"""Of the time in which the main thread sleeps and another thread stands in a queue: most of what counts as work goes on
in that one, but some threads only wake up to look around, so that a deadlock must not be excused for ever."""
PRESSURE = Path("/proc/pressure/cpu")
NS = 1e9


@dataclass(frozen=True)
class Pulse:
    """What a process got of the processors. ``starved_s``: for how long it was ready to run and had none, since it was
    first asked; ``working``: it and what it has started, such as compilers, use half a core or more."""

    starved_s: float = 0.0
    working: bool = False


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One reading. ``ready``: it runs or would run; times in seconds since it began."""

    ready: bool
    ran_s: float
    queued_s: float


class Starvation:
    """Of one process, look by look."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._seen: dict[int, Thread] = {}
        self._ahead: dict[int, float] = {}  # counted before the kernel did
        self._last_s: float | None = None
        self._used_s: float | None = None
        self._worked_at_s = float("-inf")
        self._working = False
        self._pressure_s = 0.0

    def pulse(self) -> Pulse:
        """As of the last look."""
        return Pulse(starved_s=round(self.total_s, 3), working=self._working)

    def taken(self, now_s: float, pid: int) -> Pulse:
        """Look, if another look would tell anything. ``pid``: of the process, which leads a session of its own."""
        if self._last_s is None or now_s - self._last_s >= LOOK_S:
            self.look(now_s, pid, threads_of(pid), pressure_s())
        if now_s - self._worked_at_s >= WORK_EVERY_S:
            self.worked(now_s, processor_s(pid))
        return self.pulse()

    def worked(self, now_s: float, used_s: float) -> None:
        """It has used so much processor time in all its life, what it started included."""
        known = self._used_s is not None and used_s >= self._used_s  # what ended takes its time with it
        if known and self._used_s is not None:
            self._working = used_s - self._used_s >= WORKS * (now_s - self._worked_at_s)
        self._used_s, self._worked_at_s = used_s, now_s

    def look(self, now_s: float, main: int, threads: Mapping[int, Thread], pressure_s: float = 0.0) -> None:
        """Add what passed since the last look. ``main``: the thread that trains; ``pressure_s``: of the machine, for
        want of better where nothing is known of threads."""
        passed = 0.0 if self._last_s is None else now_s - self._last_s
        held = {tid: self._held(tid, thread, passed) for tid, thread in threads.items()}
        others = max((seconds for tid, seconds in held.items() if tid != main), default=0.0)
        if not threads:
            others = pressure_s - self._pressure_s
        self._seen, self._last_s, self._pressure_s = dict(threads), now_s, pressure_s
        self.total_s += min(passed, max(held.get(main, 0.0), OTHERS_SHARE * min(passed, others)))

    def _held(self, tid: int, thread: Thread, passed_s: float) -> float:
        before = self._seen.get(tid)
        if before is None:
            return 0.0
        queued = thread.queued_s - before.queued_s
        if queued > 0:
            return max(0.0, queued - self._ahead.pop(tid, 0.0))
        if thread.ready and thread.ran_s == before.ran_s:
            self._ahead[tid] = self._ahead.get(tid, 0.0) + passed_s
            return passed_s
        self._ahead.pop(tid, None)
        return 0.0


def threads_of(pid: int) -> dict[int, Thread]:
    """The threads of a process; none where the kernel does not count, or the process is gone."""
    found: dict[int, Thread] = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError, IndexError):  # it may end just now
                base = Path(f"/proc/{pid}/task/{name}")
                ran, queued, _ = (base / "schedstat").read_text().split()
                text = (base / "stat").read_text()
                letter = text[text.rfind(")") + 2]
                found[int(name)] = Thread(ready=letter == "R", ran_s=int(ran) / NS, queued_s=int(queued) / NS)
    return found


def processor_s(session: int) -> float:
    """Processor time of all processes of a session so far, and of those that they have waited for."""
    used = [fields[11:15] for _, fields in everybody() if fields[3] == str(session)]
    return sum(int(ticks) for each in used for ticks in each) / os.sysconf("SC_CLK_TCK")


def pressure_s() -> float:
    """For how long some process of this machine has wanted a processor in vain, since it started; 0 where the kernel
    does not say."""
    with suppress(OSError, ValueError):
        return int(PRESSURE.read_text().split("total=", 1)[1].split(None, 1)[0]) / 1e6
    return 0.0
