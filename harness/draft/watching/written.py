"""Finds the files that a command writes: by listing before and after, and by what its processes
have open.

Both are bounded: a directory of a million files is listed only in part, which is said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_ENTRIES = 20_000
MOST_DEPTH = 5
LEFT_OUT = frozenset(
    {".git", "__pycache__", "node_modules", ".venv", "venv", ".mypy_cache", ".cache"}
)
CHECKPOINT = re.compile(
    r"ckpt|checkpoint|\.pth?$|\.safetensors$|\.distcp$|\.bin$|\.npz$|optimizer|model", re.IGNORECASE
)
"""Names of files, or of a directory of theirs, that hold a checkpoint."""
NO_CHECKPOINT = re.compile(r"\.(?:log|txt|out|err|py|pyc|yaml|csv|jsonl)$|events\.out\.tfevents")
"""Names of files that hold none."""
_WRITES = 0o3  # O_WRONLY | O_RDWR


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Files below a directory -> (time of the last change, size). ``partly``: not all of them."""

    files: dict[Path, tuple[int, int]]
    partly: bool = False

    def since(self, before: Listing) -> list[Path]:
        """The files that are new or have changed."""
        return sorted(path for path, state in self.files.items() if before.files.get(path) != state)


def listing(root: Path) -> Listing:
    """What lies below a directory now; links are not followed."""
    files: dict[Path, tuple[int, int]] = {}
    waiting, looked = [(root, 0)], 0
    while waiting:
        folder, depth = waiting.pop(0)
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            looked += 1
            if looked > MOST_ENTRIES:
                return Listing(files=files, partly=True)
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth < MOST_DEPTH and entry.name not in LEFT_OUT:
                        waiting.append((Path(entry.path), depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    files[Path(entry.path)] = (state.st_mtime_ns, state.st_size)
            except OSError:  # it went meanwhile
                continue
    return Listing(files=files)


def open_for_writing(pids: Iterable[int]) -> set[Path]:
    """Regular files that these processes have open for writing, as far as this user may see."""
    return {path for pid in pids for path in _written_by(pid)}


def _written_by(pid: int) -> Iterator[Path]:
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for fd in fds:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            flags = _flags(Path(f"/proc/{pid}/fdinfo/{fd}").read_text())
        except OSError:
            continue
        odd = target.startswith(("/dev/", "/proc/", "/sys/")) or target.endswith(" (deleted)")
        if target.startswith("/") and not odd and flags & _WRITES:
            yield Path(target)


def _flags(info: str) -> int:
    found = re.search(r"(?m)^flags:\s*([0-7]+)", info)
    return int(found[1], 8) if found else 0


def checkpoints(paths: Iterable[Path], root: Path) -> list[Path]:
    """Those of the files that hold checkpoints, by their names below ``root``."""
    found = []
    for path in paths:
        name = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
        if CHECKPOINT.search(name) and not NO_CHECKPOINT.search(name):
            found.append(path)
    return found
