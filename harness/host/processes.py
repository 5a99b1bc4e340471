"""Reads the operating system's state (processes, ports), and ends processes safely."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Literal

from trainchaos.recovery.process.processes import (
    become_subreaper,
    everybody,
    in_sessions,
    readable,
    start_time,
    stat_of,
    state,
)

__all__ = [
    "ancestors",
    "become_subreaper",
    "boot_id",
    "end",
    "environment_has",
    "in_sessions",
    "is_same",
    "listens",
    "memory_bytes",
    "readable",
    "since",
    "start_time",
    "state",
    "with_descendants",
]

_DEAD = "ZX"
_PF_KTHREAD = 0x200000  # include/linux/sched.h: a kernel thread, without a program
BLANK_LIMIT_S = 1.0
_LOOK_EVERY_S = 0.002

Ending = Literal["gone", "ended", "stays", "refused"]


def boot_id() -> str:
    """Identifies the current boot: process ids and start times mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def memory_bytes(pid: int) -> int:
    """Resident memory; 0 if the process is gone."""
    fields = stat_of(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def is_same(pid: int, started: int) -> bool:
    """Whether exactly that process is still running; a zombie is not."""
    fields = stat_of(pid)
    return bool(fields) and int(fields[19]) == started and fields[0] not in _DEAD


def end(pid: int, started: int, *, limit_s: float) -> Ending:
    """SIGKILL one process and wait for its end; a later process with the same pid is never hit.

    The pidfd pins the process before its start time is checked, so there is no race.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return "gone"
    try:
        if not is_same(pid, started):
            return "gone"
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return "ended" if poll.poll(limit_s * 1000) else "stays"
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "refused"
    finally:
        os.close(pidfd)


def since(started: int) -> list[tuple[int, int]]:
    """(pid, start time) of the living processes that started at that tick or later."""
    rows = ((pid, int(fields[19]), fields[0]) for pid, fields in everybody())
    return [(pid, ticks) for pid, ticks, letter in rows if ticks >= started and letter not in _DEAD]


def with_descendants(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Processes (pid, start time) and all their living descendants."""
    found = dict(rows)
    children: dict[int, list[tuple[int, int]]] = {}
    for pid, fields in everybody():
        if pid in found and int(fields[19]) != found[pid]:
            del found[pid]  # the pid was reused
        if fields[0] not in _DEAD:
            children.setdefault(int(fields[1]), []).append((pid, int(fields[19])))
    waiting = list(found)
    while waiting:
        for pid, started in children.get(waiting.pop(), []):
            if pid not in found:
                found[pid] = started
                waiting.append(pid)
    return list(found.items())


def environment_has(pid: int, entry: str) -> bool:
    """Whether a process was started with this ``NAME=value``; False if its environment is
    unreadable.

    A process has an empty environment while it executes another program, and while it dies: wait up
    to ``BLANK_LIMIT_S`` for its environment or its end. It may also have none at all.
    """
    deadline = time.monotonic() + BLANK_LIMIT_S
    while True:
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        fields = stat_of(pid)
        no_program = not fields or fields[0] in _DEAD or int(fields[6]) & _PF_KTHREAD
        if entries != [b""] or no_program or time.monotonic() > deadline:
            return entry.encode() in entries
        time.sleep(_LOOK_EVERY_S)


def ancestors(pid: int) -> set[int]:
    """A process, its parent, and so on up to the first."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        fields = stat_of(pid)
        pid = int(fields[1]) if fields else 0
    return found


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a process accepts connections on a port of this machine."""
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((host, port)) == 0
