"""Small looks at the operating system: process states, sessions, ports, shared memory."""

from __future__ import annotations

import ctypes
import os
import select
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_SHM = Path("/dev/shm")
_SHM_PREFIXES = ("torch_", "nccl-", "gloo", "psm_", "sem.")


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process, so that it can wait for them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def state(pid: int) -> str:
    """The kernel's one-letter state of a process, X when there is none."""
    fields = _stat(pid)
    return fields[0] if fields else "X"


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names one process for ever. 0: gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def in_sessions(sessions: Collection[int]) -> list[int]:
    """Living processes that belong to one of these sessions, whoever is their parent."""
    return [pid for pid, fields in _all() if int(fields[3]) in sessions and fields[0] not in "ZX"]


def shared_memory_names() -> set[str]:
    """Segments there are now whose names are those that torch, NCCL and Python's multiprocessing give."""
    if not _SHM.is_dir():
        return set()
    return {path.name for path in _SHM.iterdir() if path.name.startswith(_SHM_PREFIXES)}


def listens(port: int) -> bool:
    """Whether somebody accepts connections on a local port."""
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", port)) == 0


def readable(fd: int) -> bool:
    """Whether a read would return at once."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on (the name before it may hold anything)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()


def _all() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields:
                yield int(name), fields
