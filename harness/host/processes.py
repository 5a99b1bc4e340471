"""Reads the operating system's state (processes, ports, shared memory), and ends processes
safely.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterable
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
    "abandoned_shared_memory",
    "ancestors",
    "become_subreaper",
    "boot_id",
    "end",
    "environment_has",
    "free_shared_memory",
    "in_sessions",
    "is_same",
    "listens",
    "memory_bytes",
    "readable",
    "shared_memory_names",
    "since",
    "start_time",
    "state",
    "unheld",
    "with_descendants",
]

_SHM = Path("/dev/shm")
_SHM_PREFIXES = ("torch_", "nccl-", "gloo", "psm_", "sem.")
_DEAD = "ZX"
# the longest tick of Linux (HZ=100): a file's time may be this far behind the clock
_TICK_NS = 10_000_000
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


def shared_memory_names() -> set[str]:
    """Present segments with the names that torch, NCCL and Python's multiprocessing use."""
    if not _SHM.is_dir():
        return set()
    return {path.name for path in _SHM.iterdir() if path.name.startswith(_SHM_PREFIXES)}


def abandoned_shared_memory(since_ns: int, until_ns: int) -> list[Path]:
    """Segments of this user made between two moments (Unix time) that no living process has open or
    mapped.

    Segments of another run or program are held by its own processes, so they are never included.
    """
    found = []
    for name in sorted(shared_memory_names()):
        path = _SHM / name
        try:
            info = path.stat()
        except OSError:
            continue
        if info.st_uid == os.getuid() and since_ns - _TICK_NS <= info.st_ctime_ns <= until_ns:
            found.append(path)
    return unheld(found)


def unheld(paths: Iterable[Path]) -> list[Path]:
    """Files that no living process has open or mapped, as far as this user may see."""
    wanted = list(paths)
    held = _held_files() if wanted else set()
    return [path for path in wanted if str(path) not in held]


def free_shared_memory(since_ns: int, until_ns: int) -> tuple[list[str], list[str]]:
    """Remove the files of ``abandoned_shared_memory``: (names removed, names not removable)."""
    freed, left = [], []
    for path in abandoned_shared_memory(since_ns, until_ns):
        try:
            path.unlink(missing_ok=True)
        except OSError:
            left.append(path.name)
        else:
            freed.append(path.name)
    return freed, left


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a process accepts connections on a port of this machine."""
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((host, port)) == 0


def _held_files() -> set[str]:
    """Shared memory that living processes have open or mapped, as far as this user may see."""
    held = set()
    for pid, _ in everybody():
        try:
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if str(_SHM) in line:
                    held.add(line.split(maxsplit=5)[-1])
            for link in os.scandir(f"/proc/{pid}/fd"):
                held.add(os.readlink(link.path))
        except OSError:
            continue
    return held
