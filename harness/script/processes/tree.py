"""Reads a command's processes from the kernel: which exist, what each is, how each ended."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ENVIRONMENT_LIMIT = 1 << 20
WRAPPERS = frozenset(
    {"sh", "bash", "dash", "zsh", "env", "nice", "numactl", "taskset", "timeout", "stdbuf", "time"}
)
"""Programs that stand in front of a rank; the rank is their child."""
_FILTERS = {"tee", "cat", "grep", "sed", "awk", "gawk", "mawk", "ts", "tail", "head", "tr", "cut"}
PLUMBING = frozenset(_FILTERS | {"logger", "sleep"})
"""Programs that a shell runs beside a rank, to process its output or to wait."""
HELPERS = ("multiprocessing", "compile_worker")
"""Words in the command lines of helper processes that Python starts for a program."""
_ESTABLISHED = "01"
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info) with its first 64 bytes
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """One row of the kernel's process table. ``pid`` and ``started`` together are unique;
    ``ticks``: of processor time so far; ``status``: how it ended, until it is reaped.
    """

    pid: int
    parent: int
    started: int
    state: str
    name: str
    session: int = 0
    ticks: int = 0
    status: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        """It, and no later process with its pid."""
        return self.pid, self.started


def _text(path: str, limit: int = -1) -> str:
    """Of a file of the kernel; empty if the process is gone or belongs to another user."""
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode(errors="replace")
    except OSError:
        return ""


def process(pid: int) -> ProcessRow | None:
    """The row of a process, or None if it is gone."""
    text = _text(f"/proc/{pid}/stat")
    if not text:
        return None
    start, end = text.find("("), text.rfind(")")
    fields = text[end + 2 :].split()
    return ProcessRow(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        state=fields[0],
        name=text[start + 1 : end],
        session=int(fields[3]),
        ticks=int(fields[11]) + int(fields[12]),
        status=int(fields[49]) if len(fields) > 49 and fields[0] in "ZX" else None,
    )


def below(root: int) -> dict[int, ProcessRow]:
    """All living descendants of ``root``, parents before children."""
    children: dict[int, list[ProcessRow]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (row := process(int(name))):
            children.setdefault(row.parent, []).append(row)
    found: dict[int, ProcessRow] = {}
    front = [root]
    while front:
        rows = [row for parent in front for row in children.get(parent, ()) if row.pid not in found]
        found.update((row.pid, row) for row in rows)
        front = [row.pid for row in rows]
    return {pid: row for pid, row in found.items() if row.state not in "ZX"}


def is_below(pid: int, top: int, rows: Mapping[int, ProcessRow]) -> bool:
    """Whether a process is ``top`` or descends from it."""
    while pid in rows and pid != top:
        pid = rows[pid].parent
    return pid == top


def environment(pid: int) -> Mapping[str, str]:
    """The initial environment of a process; empty if it is gone or belongs to another user."""
    entries = _text(f"/proc/{pid}/environ", ENVIRONMENT_LIMIT).split("\0")
    pairs = (entry.partition("=") for entry in entries if "=" in entry)
    return MappingProxyType({key: value for key, _, value in pairs})


def command_line(pid: int) -> str:
    """The words of a process's command, each ended by a null byte; empty if it is gone."""
    return _text(f"/proc/{pid}/cmdline")


def is_helper(pid: int) -> bool:
    """Whether Python started it to help a program."""
    return any(word in command_line(pid) for word in HELPERS)


def written(pid: int) -> int | None:
    """Bytes that it has written, to files as well; None if that is not known."""
    lines = _text(f"/proc/{pid}/io").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar")), None)


def opened(pid: int) -> dict[str, str]:
    """Path of each of its descriptors -> what it is; those that it has closed meanwhile are left
    out.
    """
    place = Path(f"/proc/{pid}/fd")
    try:
        paths = [str(place / name) for name in os.listdir(place)]
    except OSError:
        return {}
    links = {path: link(path) for path in paths}
    return {path: target for path, target in links.items() if target}


def link(path: str) -> str:
    """Where a link leads; empty if it is gone."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def connections(pid: int) -> set[str]:
    """Its TCP connections, by the numbers that the kernel gives to sockets."""
    links = opened(pid).values()
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in (_text(f"/proc/{pid}/net/{table}").splitlines()[1:] if sockets else ())
    ]
    return sockets & {row[9] for row in lines if row[3] == _ESTABLISHED}


def behind(pid: int, rows: Mapping[int, ProcessRow]) -> list[int]:
    """The processes that a wrapper runs, oldest first; for any other process, itself."""
    if not is_wrapper(rows[pid]):
        return [pid]
    children = sorted(
        (row for row in rows.values() if row.parent == pid and row.name not in PLUMBING),
        key=lambda row: (row.started, row.pid),
    )
    return [front for child in children for front in behind(child.pid, rows)] or [pid]


def is_wrapper(row: ProcessRow) -> bool:
    """Whether it is a wrapper by its name or, for a script, by its interpreter."""
    return not WRAPPERS.isdisjoint({row.name, os.path.basename(link(f"/proc/{row.pid}/exe"))})


def wait_status(pid: int, started: int, pidfd: int) -> int | None:
    """Wait status of a process that is not our child; None if unknown.

    Its row has the status until its parent reaps it; afterwards the kernel (6.15 and later) still
    gives it to holders of a pidfd.
    """
    row = process(pid)
    if row is not None and row.started == started and row.status is not None:
        return row.status
    request = bytearray(64)
    struct.pack_into("=Q", request, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, code = struct.unpack_from("=Q", request, 0)[0], struct.unpack_from("=i", request, 60)[0]
    return code if mask & _PIDFD_INFO_EXIT else None


def how(status: int | None) -> tuple[int | None, int | None]:
    """(exit code, signal) of a wait status; both None if it is unknown."""
    if status is None:
        return None, None
    code = os.waitstatus_to_exitcode(status)
    return (None, -code) if code < 0 else (code, None)
