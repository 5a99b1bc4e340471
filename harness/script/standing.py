"""Threads of a command that said they hang: what the kernel counts of them, as a witness other than their word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.starvation import Thread, threads_of

WATCH_S = 0.2
NS = 1e9
Key = tuple[str, int, int]
"""Fault, occurrence, step."""


@dataclass(frozen=True, kw_only=True)
class _Watched:
    key: Key
    pid: int
    tid: int
    since_ns: int
    then: Thread


class Standing:
    """``threads``: of a process, by id."""

    def __init__(self, threads: Callable[[int], Mapping[int, Thread]] = threads_of) -> None:
        self._threads = threads
        self._watched: list[_Watched] = []

    def watch(self, key: Key, *, pid: int, tid: int, now_ns: int) -> None:
        """Follow a thread; its process's main one where it is not known (0, or of another namespace)."""
        found = self._threads(pid)
        tid = tid if tid in found else pid
        if tid in found:
            self._watched.append(_Watched(key=key, pid=pid, tid=tid, since_ns=now_ns, then=found[tid]))

    def seen(self, now_ns: int) -> list[tuple[Key, dict[str, Any]]]:
        """(fault, occurrence, step) and the processor time of those watched for long enough; those gone say nothing."""
        due = [row for row in self._watched if (now_ns - row.since_ns) / NS >= WATCH_S]
        self._watched = [row for row in self._watched if row not in due]
        rows = []
        for row in due:
            now = self._threads(row.pid).get(row.tid)
            if now is not None:
                evidence = {
                    "watched_s": round((now_ns - row.since_ns) / NS, 3),
                    "ran_s": round(now.ran_s - row.then.ran_s, 3),
                    "queued_s": round(now.queued_s - row.then.queued_s, 3),
                }
                rows.append((row.key, evidence))
        return rows
