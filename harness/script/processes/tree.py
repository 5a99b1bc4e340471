"""Reads a command's processes from the kernel: which exist, which rank each is, how each ended."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
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
"""Programs that stand in front of a rank; the rank is their child."""
_FILTERS = {"tee", "cat", "grep", "sed", "awk", "gawk", "mawk", "ts", "tail", "head", "tr", "cut"}
PLUMBING = frozenset(_FILTERS | {"logger", "sleep"})
"""Programs that a shell runs beside a rank, to process its output or to wait."""
HELPERS = ("multiprocessing", "compile_worker")
"""Words in the command lines of helper processes that Python starts for a program."""
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


@dataclass(frozen=True, kw_only=True)
class FoundRank:
    """A process that is a rank. ``world``: number of ranks in its environment; None if not given.

    ``top``: the wrapper in front of it that has its rank, or else the process itself. ``sure``: its
    environment or its reports name its rank; otherwise it is only the one rank of a command, or of
    a replica group. ``direct``: there is no wrapper, whose helpers could be mistaken for it.
    ``size``: ranks in its replica group, if there are groups; ``in_group``: its environment names
    its rank in that.
    """

    rank: int
    world: int | None
    pid: int
    started: int
    top: int = 0
    sure: bool = True
    direct: bool = True
    size: int = 1
    in_group: bool = False


@dataclass(frozen=True, kw_only=True)
class _Said:
    """What an environment says of a rank; fields as of ``FoundRank``."""

    rank: int | None = None
    world: int | None = None
    size: int = 1
    in_group: bool = False


_NO_RANK = _Said()
Choose = Callable[[int, Mapping[int, ProcessRow]], int | None]
"""(a process, all processes) -> the one at or below it that is the only rank; see
``harness.script.processes.trainer``.
"""


def process(pid: int) -> ProcessRow | None:
    """The row of a process, or None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
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
    rows = {
        p.pid: p for name in os.listdir("/proc") if name.isdigit() and (p := process(int(name)))
    }
    children: dict[int, list[ProcessRow]] = {}
    for row in rows.values():
        children.setdefault(row.parent, []).append(row)
    found: dict[int, ProcessRow] = {}
    front = [root]
    while front:
        front = [
            child.pid
            for parent in front
            for child in children.get(parent, [])
            if child.pid not in found
        ]
        found.update((pid, rows[pid]) for pid in front)
    return {pid: row for pid, row in found.items() if row.state not in "ZX"}


def environment(pid: int) -> Mapping[str, str]:
    """The initial environment of a process; empty if it is gone or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            raw = stream.read(ENVIRONMENT_LIMIT)
    except OSError:
        return MappingProxyType({})
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def find_ranks(
    root: int,
    expected: int,
    hints: Mapping[int, int],
    command: int | None = None,
    *,
    group: str | None = None,
    launched: bool = False,
    choose: Choose | None = None,
    alike: Callable[[Mapping[int, ProcessRow]], dict[int, FoundRank]] | None = None,
) -> dict[int, FoundRank]:
    """Rank -> its process, among the descendants of ``root``.

    A rank is the topmost process with that rank in its environment, or the child of a wrapper that
    is; rank 0 may be the program that started itself again for the others. ``hints``: pid -> rank,
    from the processes' own reports, which take precedence. If a command of one rank names none in
    its environment, its process, or the one that ``choose`` returns, is the rank; ``command``: its
    process, whose death leaves no rank. Of two processes with one rank (an old one is exiting) the
    younger counts. ``group``: variable with a process's replica group, if each group counts its
    ranks from 0: who names no rank is its only one, or its launcher if anyone in a group names one,
    or did (``launched``). ``alike``: finds the ranks of a command that nothing names
    (``harness.script.processes.alike``).
    """
    rows = below(root)
    said = _all_said(rows, group, launched=launched)
    found: dict[int, FoundRank] = {}
    for row in rows.values():
        own = said.get(row.pid, _NO_RANK)
        if own.rank is None or own.rank == said.get(row.parent, _NO_RANK).rank:
            continue
        sure = group is None or own.in_group
        _take(found, own.rank, own, rows[behind(row.pid, rows)[0]], top=row.pid, sure=sure)
    if (first := _starter(found, rows, said)) is not None:
        _take(found, 0, _Said(world=found[1].world), rows[first], top=first)
    tops = [row for row in rows.values() if row.parent == root and command in (None, row.pid)]
    if not found and expected == 1 and tops:
        top = min(tops, key=lambda row: (row.started, row.pid)).pid
        front = behind(top, rows)[0]
        trains = choose(front, rows) if choose is not None else front
        if trains is not None:
            top = top if trains == front else trains
            _take(found, 0, _Said(world=1), rows[trains], top=top, sure=False)
    if not found and not hints and expected > 1 and alike is not None:
        found = alike(rows)
    spoken: dict[int, FoundRank] = {}
    for pid, word in hints.items():
        rank = said.get(pid, _NO_RANK).rank if group is not None else word
        if rank is None or pid not in rows:
            continue
        known = found.get(rank)
        if known is None or not known.sure or _is_below(pid, known.top, rows):
            own = _Said(
                world=known.world if known else None,
                size=known.size if known else 1,
                in_group=known.in_group if known else False,
            )
            _take(spoken, rank, own, rows[pid], top=pid)
    return found | spoken


def _starter(
    found: Mapping[int, FoundRank],
    rows: Mapping[int, ProcessRow],
    said: Mapping[int, _Said],
) -> int | None:
    """The process that started all other ranks, each with its own command line, as Lightning's
    launcher does; None where rank 0 is another one or missing.
    """
    parents = {rows[one.top].parent for one in found.values() if one.top in rows}
    if 0 in found or 1 not in found or len(parents) != 1:
        return None
    first = parents.pop()
    same = first in said and said[first].rank is None
    return first if same and all(_argv(one.pid) == _argv(first) for one in found.values()) else None


def _argv(pid: int) -> list[str]:
    """A process's command line, whatever the place of its program and script, without flags of the
    interpreter.
    """
    words = command_line(pid).split("\0")
    return [os.path.basename(word) for word in words[1:] if not re.fullmatch(r"-[A-Za-z]+", word)]


def command_line(pid: int) -> str:
    """The words of a process's command, each ended by a null byte; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _all_said(pids: Iterable[int], group: str | None, *, launched: bool) -> dict[int, _Said]:
    """What each process says that is no launcher of a group. See ``find_ranks``."""
    said = {pid: _said(pid, group) for pid in pids}
    if launched or any(one.in_group and not is_helper(pid) for pid, one in said.items()):
        said = {pid: one for pid, one in said.items() if one.in_group}
    return said


def _said(pid: int, group: str | None) -> _Said:
    """What a process's environment says."""
    env = environment(pid)
    rank, world = next(
        (
            (rank, number(env.get(world_name)))
            for rank_name, world_name in zip(RANK_NAMES, WORLD_NAMES, strict=True)
            if (rank := number(env.get(rank_name))) is not None
        ),
        (None, None),
    )
    if group is None:
        return _Said(rank=rank, world=world)
    index, size = group_number(env.get(group)), world or 1
    if index is None or (whole := index * size + (rank or 0)) >= MOST_RANKS:
        return _NO_RANK
    return _Said(rank=whole, size=size, in_group=rank is not None)


def is_helper(pid: int) -> bool:
    """Whether Python started it to help a program."""
    return any(word in command_line(pid) for word in HELPERS)


def group_number(text: str | None) -> int | None:
    """The number at the end of a replica group's name: ``3``, ``replica_3``; None if there
    is none.
    """
    digits = re.search(r"[0-9]+$", (text or "").strip())
    return number(digits[0]) if digits else None


def number(text: str | None) -> int | None:
    """A rank or a count of ranks from an environment, None if it is malformed."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 6:
        return None
    return value if (value := int(text)) < MOST_RANKS else None


def behind(pid: int, rows: Mapping[int, ProcessRow]) -> list[int]:
    """The processes that a wrapper runs, oldest first; for any other process, itself."""
    if not _is_wrapper(rows[pid]):
        return [pid]
    children = sorted((row.started, row.pid) for row in rows.values() if row.parent == pid)
    working = [child for _, child in children if rows[child].name not in PLUMBING]
    return [front for child in working for front in behind(child, rows)] or [pid]


def struck_with(found: FoundRank, *, whole: bool) -> dict[int, ProcessRow]:
    """The processes that are hit with a rank: all that its wrapper started, never only the wrapper.

    ``whole``: with all their descendants.
    """
    top = process(found.top)
    rows = below(found.top) | ({found.top: top} if top else {})
    if found.pid not in rows:  # its wrapper is gone
        own = process(found.pid)
        rows = below(found.pid) | ({found.pid: own} if own else {})
        fronts = [found.pid] if own else []
    else:
        fronts = sorted({found.pid, *behind(found.top, rows)})
    return {
        pid: row
        for pid, row in rows.items()
        if pid in fronts or (whole and any(_is_below(pid, front, rows) for front in fronts))
    }


def _is_wrapper(row: ProcessRow) -> bool:
    """Whether it is a wrapper by its name or, for a script, by its interpreter."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{row.pid}/exe"))
    except OSError:
        program = ""
    return row.name in WRAPPERS or program in WRAPPERS


def _is_below(pid: int, top: int, rows: Mapping[int, ProcessRow]) -> bool:
    while pid in rows and pid != top:
        pid = rows[pid].parent
    return pid == top


def _take(
    found: dict[int, FoundRank],
    rank: int,
    said: _Said,
    row: ProcessRow,
    *,
    top: int,
    sure: bool = True,
) -> None:
    known = found.get(rank)
    if known is None or row.started >= known.started:
        found[rank] = FoundRank(
            rank=rank,
            world=said.world,
            pid=row.pid,
            started=row.started,
            top=top,
            sure=sure,
            direct=top == row.pid and not _is_wrapper(row),
            size=said.size,
            in_group=said.in_group,
        )


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
