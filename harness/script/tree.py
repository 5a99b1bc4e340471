"""The processes of a command, as the kernel shows them: who is there, which of them is which rank, how one ended."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
WORLD_NAMES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "LOCAL_WORLD_SIZE")
ENVIRONMENT_LIMIT = 1 << 20
MOST_RANKS = 1 << 16
WRAPPERS = frozenset(
    {"sh", "bash", "dash", "zsh", "env", "nice", "numactl", "taskset", "timeout", "stdbuf", "time"}
)
"""Programs that stand in front of a rank; the one child they have is meant."""
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info) with its first 64 bytes
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(frozen=True, kw_only=True)
class Process:
    """One row of the kernel's process table. ``started`` with ``pid`` names it for ever."""

    pid: int
    parent: int
    started: int
    state: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """A process that is a rank. ``world``: how many there are, by its environment; None: it does not say."""

    rank: int
    world: int | None
    pid: int
    started: int


def process(pid: int) -> Process | None:
    """The row of a process, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    start, end = text.find("("), text.rfind(")")
    fields = text[end + 2 :].split()
    return Process(
        pid=pid, parent=int(fields[1]), started=int(fields[19]), state=fields[0], name=text[start + 1 : end]
    )


def below(root: int) -> dict[int, Process]:
    """All living processes below ``root``, itself left out, parents before children."""
    rows = {p.pid: p for name in os.listdir("/proc") if name.isdigit() and (p := process(int(name)))}
    children: dict[int, list[Process]] = {}
    for row in rows.values():
        children.setdefault(row.parent, []).append(row)
    found: dict[int, Process] = {}
    front = [root]
    while front:
        front = [
            child.pid for parent in front for child in children.get(parent, []) if child.pid not in found
        ]
        found.update((pid, rows[pid]) for pid in front)
    return {pid: row for pid, row in found.items() if row.state not in "ZX"}


def environment(pid: int) -> Mapping[str, str]:
    """The environment a process was started with; empty when it is gone or somebody else's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            raw = stream.read(ENVIRONMENT_LIMIT)
    except OSError:
        return MappingProxyType({})
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def find_ranks(root: int, expected: int, hints: Mapping[int, int]) -> dict[int, Found]:
    """Rank -> its process, among those below ``root``.

    A rank is the topmost process with that rank in its environment, or the only child of a wrapper that is.
    ``hints``: pid -> rank, as the processes said themselves; they count where the environment says nothing. A
    command of one rank whose environment names none is that rank itself. Of two processes with one rank (an old
    one on its way out) the younger counts.
    """
    rows = below(root)
    said = {pid: _said(pid) for pid in rows}
    children: dict[int, list[int]] = {}
    for row in rows.values():
        children.setdefault(row.parent, []).append(row.pid)
    found: dict[int, Found] = {}
    for row in rows.values():
        rank, world = said[row.pid]
        if rank is None or rank == said.get(row.parent, (None, None))[0]:
            continue
        _take(found, rank, world, rows[_behind_wrappers(row.pid, rows, children)])
    for pid, rank in hints.items():
        if rank not in found and pid in rows:
            _take(found, rank, None, rows[pid])
    if not found and expected == 1 and rows:
        top = next(row.pid for row in rows.values() if row.parent == root)
        _take(found, 0, 1, rows[_behind_wrappers(top, rows, children)])
    return found


def _said(pid: int) -> tuple[int | None, int | None]:
    env = environment(pid)
    for rank_name, world_name in zip(RANK_NAMES, WORLD_NAMES, strict=True):
        rank, world = number(env.get(rank_name)), number(env.get(world_name))
        if rank is not None:
            return rank, world
    return None, None


def number(text: str | None) -> int | None:
    """A rank or a count of ranks written in an environment, None when it is none."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 6:
        return None
    return value if (value := int(text)) < MOST_RANKS else None


def _behind_wrappers(pid: int, rows: Mapping[int, Process], children: Mapping[int, list[int]]) -> int:
    while rows[pid].name in WRAPPERS and len(children.get(pid, [])) == 1:
        pid = children[pid][0]
    return pid


def _take(found: dict[int, Found], rank: int, world: int | None, row: Process) -> None:
    known = found.get(rank)
    if known is None or row.started >= known.started:
        found[rank] = Found(rank=rank, world=world, pid=row.pid, started=row.started)


def wait_status(pid: int, started: int, pidfd: int) -> int | None:
    """How a process that is no child of this one ended, as ``wait`` would say; None when nobody can tell.

    While its parent has not reaped it, its row says; afterwards the kernel (6.15 and later) still tells those who
    hold a pidfd.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        text = ""
    fields = text[text.rfind(")") + 2 :].split()
    if len(fields) > 49 and fields[0] in "ZX" and int(fields[19]) == started:
        return int(fields[49])
    request = bytearray(64)
    struct.pack_into("=Q", request, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, code = struct.unpack_from("=Q", request, 0)[0], struct.unpack_from("=i", request, 60)[0]
    return code if mask & _PIDFD_INFO_EXIT else None


def how(status: int | None) -> tuple[int | None, int | None]:
    """(exit code, signal) of a wait status; both None when it is not known."""
    if status is None:
        return None, None
    return (
        (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.waitstatus_to_exitcode(status), None)
    )
