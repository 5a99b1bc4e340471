"""Queries to the operating system: process states, sessions, descriptors; and how a child is tied
to its parent.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from trainchaos.chaos.errors import DISK_TAKES_NOTHING

EXIT_ORPHANED = 70
END_LIMIT_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # include/linux/sched.h: set first of all when a thread exits


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process, so that it can wait for them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent exits, so that no exit of a supervisor
    leaves an orphan.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it exited before the request was in place
        os._exit(EXIT_ORPHANED)


def redirect_output(log: Path) -> None:
    """Append standard output and error to a file from now on, and read nothing from standard input.
    Where the disk has no space for a file they are discarded.
    """
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        if error.errno not in DISK_TAKES_NOTHING:
            raise
        fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def state(pid: int) -> str:
    """The kernel's one-letter state of a process, X when there is none."""
    fields = stat_of(pid)
    return fields[0] if fields else "X"


def is_exiting(pid: int) -> bool:
    """Whether the kernel is ending a process, or has: its main thread executes no further
    instruction.
    """
    fields = stat_of(pid)
    return not fields or bool(int(fields[6]) & _PF_EXITING)


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it identifies one process for
    ever. 0: it has exited.
    """
    fields = stat_of(pid)
    return int(fields[19]) if fields else 0


def in_sessions(sessions: Collection[int]) -> list[int]:
    """Living processes that belong to one of these sessions, whatever their parent."""
    return [
        pid for pid, fields in everybody() if int(fields[3]) in sessions and fields[0] not in "ZX"
    ]


def end_sessions(sessions: Collection[int]) -> list[int]:
    """Kill every process of these sessions, such as the workers of a data loader; returns those
    that stay.

    The caller started each session, and waited for its leader only if that has ended: the kernel
    does not reuse the number of a session while it has members.
    """
    deadline = time.monotonic() + END_LIMIT_S
    while (left := in_sessions(sessions)) and time.monotonic() < deadline:
        for pid in left:
            _kill_member(pid, sessions)
    return left


def _kill_member(pid: int, sessions: Collection[int]) -> None:
    """Kill a process if it is still of one of these sessions; wait for its end, and reap it if it
    is our child.
    """
    with suppress(ProcessLookupError, PermissionError):
        fd = os.pidfd_open(pid)
        try:
            fields = stat_of(pid)  # read only once the descriptor pins the process
            if not fields or int(fields[3]) not in sessions:
                return
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(END_LIMIT_S * 1000)
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
        finally:
            os.close(fd)


def readable(fd: int) -> bool:
    """Whether a read would return at once."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on (the name before it may hold anything)."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096).decode(
                "latin-1"
            )  # reads the whole file; a supervisor reads several in each of its turns
        finally:
            os.close(fd)
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()


def everybody() -> Iterator[tuple[int, list[str]]]:
    """Every process of this machine: its pid, and its ``stat_of``."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_of(int(name))
            if fields:
                yield int(name), fields
