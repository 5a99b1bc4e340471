"""Shared memory of this machine: which files of it are there, and which of them a process uses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from trainchaos.recovery.process.processes import everybody

SHM = Path("/dev/shm")
PREFIXES = ("torch_", "nccl-", "gloo", "psm_", "sem.")
# the longest tick of Linux (HZ=100): a file's time may be this far behind the clock
_TICK_NS = 10_000_000

Inode = int
"""Number of a file in its directory. Its name does not tell whether it is used: glibc opens and
maps a semaphore under another one, and links it to its own afterwards.
"""


def names() -> set[str]:
    """Present segments with the names that torch, NCCL and Python's multiprocessing use."""
    if not SHM.is_dir():
        return set()
    return {path.name for path in SHM.iterdir() if path.name.startswith(PREFIXES)}


def abandoned(since_ns: int, until_ns: int) -> list[Path]:
    """Segments of this user made between two moments (Unix time) that no living process has open or
    mapped.

    Segments of another run or program are held by its own processes, so they are never included.
    """
    found = []
    for name in sorted(names()):
        path = SHM / name
        try:
            info = path.stat()
        except OSError:
            continue
        if info.st_uid == os.getuid() and since_ns - _TICK_NS <= info.st_ctime_ns <= until_ns:
            found.append(path)
    return unheld(found)


def free(since_ns: int, until_ns: int) -> tuple[list[str], list[str]]:
    """Remove the files of ``abandoned``: (names removed, names not removable)."""
    freed, left = [], []
    for path in abandoned(since_ns, until_ns):
        try:
            path.unlink(missing_ok=True)
        except OSError:
            left.append(path.name)
        else:
            freed.append(path.name)
    return freed, left


def unheld(paths: Iterable[Path], directory: Path | None = None) -> list[Path]:
    """Those files of a directory (default: SHM) that no living process has open or mapped, as far
    as this user may see.
    """
    files = {path: inode for path in paths if (inode := inode_of(path)) is not None}
    held: set[Inode] = set()
    if files:
        held.update(*(held_by(pid, directory or SHM) for pid, _ in everybody()))
    return [path for path, inode in files.items() if inode not in held]


def held_by(pid: int, directory: Path) -> set[Inode]:
    """Files in a directory, removed ones too, that a process has open or mapped; empty if it is
    gone, or may not be looked at.
    """
    return {*_mapped(pid, f"{directory}/"), *_open(pid, f"{directory}/")}


def inode_of(path: Path) -> Inode | None:
    """Which file has this name; None if none has."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _mapped(pid: int, start: str) -> Iterator[Inode]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if f" {start}" in line:
            # address, rights, offset, device, inode, name (man 5 proc_pid_maps)
            yield int(line.split(maxsplit=5)[4])


def _open(pid: int, start: str) -> Iterator[Inode]:
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for entry in entries:
        # One that is closed meanwhile says nothing of the others.
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{entry}").startswith(start):
                yield os.stat(f"/proc/{pid}/fd/{entry}").st_ino
