"""Measures threads of a command that report a hang, by the kernel's counts, as independent
evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trainchaos.recovery.process.starvation import ThreadReading, threads_of

WATCH_S = 0.2
LEAST_S = 0.03
"""Shortest useful measurement: three clock ticks of the kernel, in which it may count. A stack that
kills hung ranks early leaves little to measure; this is below the shortest time-out that any stack
is swept with (50 ms).
"""
NS = 1e9
Key = TypeVar("Key")


@dataclass(kw_only=True)
class _Watched(Generic[Key]):
    key: Key
    pid: int
    tid: int
    since_ns: int
    then: ThreadReading
    last: ThreadReading
    seconds: float = 0.0  # between the two


class HangWitness(Generic[Key]):
    """Watches threads that report a hang. ``threads``: the threads of a process, by id."""

    def __init__(self, threads: Callable[[int], Mapping[int, ThreadReading]] = threads_of) -> None:
        self._threads = threads
        self._watched: list[_Watched[Key]] = []

    def watch(self, key: Key, *, pid: int, tid: int, now_ns: int) -> None:
        """Follow a thread; its process's main thread if it is unknown (0, or of another
        namespace).
        """
        threads = self._threads(pid)
        tid = tid if tid in threads else pid
        if then := threads.get(tid):
            row = _Watched(key=key, pid=pid, tid=tid, since_ns=now_ns, then=then, last=then)
            self._watched.append(row)

    def seen(self, now_ns: int) -> list[tuple[Key, dict[str, Any]]]:
        """Keys, and the processor time of threads watched long enough, or until they ended."""
        rows, still = [], []
        for row in self._watched:
            if now := self._threads(row.pid).get(row.tid):
                row.seconds, row.last = (now_ns - row.since_ns) / NS, now
            if now and row.seconds < WATCH_S:
                still.append(row)
            elif row.seconds >= LEAST_S:
                evidence = {
                    "watched_s": round(row.seconds, 3),
                    "ran_s": round(row.last.ran_s - row.then.ran_s, 3),
                    "queued_s": round(row.last.queued_s - row.then.queued_s, 3),
                }
                rows.append((row.key, evidence))
        self._watched = still
        return rows
