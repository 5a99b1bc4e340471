"""Follows files while a command is watched, and tells checkpoints by what happens to them, whatever
their names are.

A checkpoint is written again and again after the first step: to a new file or directory each time,
often with the step in its name, or over the last one. A log only grows at its end. Listings are
bounded: a directory of a million files is listed only in part.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
LOOK_EVERY_S = 0.5
REST = 20.0
"""A look is not taken again before this many times the time that it took."""
READ = 4096
_TEXT = bytes({*range(32, 256), *b"\t\n\r\f\b\x1b"})
_NO_STATE = re.compile(r"\.(?:png|jpe?g|gif|svg|html?|pdf|md|tsv|lock|tmp|pid)$", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
SURE = {3: "surely checkpoints", 2: "probably checkpoints", 1: "perhaps checkpoints"}
"""How sure it is, in words."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Files below a directory -> (time of the last change, size)."""

    files: dict[Path, tuple[int, int]]

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
                return Listing(files=files)
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


@dataclass(kw_only=True)
class FileHistory:
    """One file. ``writes``: seconds since the start at which it was seen changed, each with its
    size; ``new``: it was not there before; ``text``: it holds text.
    """

    writes: list[tuple[float, int]] = field(default_factory=list)
    new: bool = True
    text: bool = False

    def after(self, seconds: float) -> list[int]:
        """Its sizes as they were seen from then on."""
        return [size for at, size in self.writes if at >= seconds]

    @property
    def appended(self) -> bool:
        """Whether it only grew, as a log does."""
        sizes = [size for _, size in self.writes]
        return len(sizes) > 2 and sizes == sorted(set(sizes))


class Changes:
    """The files below some directories."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = _outermost(roots)
        self._last = self._listing()
        self._before = frozenset(self._last.files)
        self._due_s = 0.0
        self.files: dict[Path, FileHistory] = {}

    def look(self, seconds: float, *, at_once: bool = False) -> None:
        """Note what has changed. ``seconds``: since the start."""
        if seconds < self._due_s and not at_once:
            return
        began = time.monotonic()
        now = self._listing()
        for path in now.since(self._last):
            known = self.files.setdefault(path, FileHistory(new=path not in self._before))
            known.writes.append((seconds, now.files[path][1]))
            known.text = is_text(path)
        self._last = now
        self._due_s = seconds + max(LOOK_EVERY_S, REST * (time.monotonic() - began))

    def _listing(self) -> Listing:
        files: dict[Path, tuple[int, int]] = {}
        for root in self._roots:
            files |= listing(root).files
        return Listing(files=files)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Files of one kind that look like checkpoints. ``grade``: how surely, see ``SURE``; ``why``:
    in words.
    """

    paths: Sequence[Path]
    grade: int
    why: str


def kept(
    files: Mapping[Path, FileHistory],
    *,
    steps: Iterable[int],
    first_s: float | None,
    log_size: int,
) -> list[Kept]:
    """Files that look like checkpoints, surest first. ``steps``: those that were seen, the first
    one after ``first_s``; ``log_size``: bytes that the command printed.
    """
    if first_s is None:
        return []
    families: dict[str, list[Path]] = {}
    logs = [log_size]
    for path, one in files.items():
        if one.appended or NO_CHECKPOINT.search(path.name):
            logs.append(max(size for _, size in one.writes))
        elif one.after(first_s) and not _NO_STATE.search(path.name):
            families.setdefault(_DIGITS.sub("#", str(path)), []).append(path)
    seen = set(steps)
    found = [_judged(paths, files, seen, first_s, max(logs)) for paths in families.values()]
    return sorted((one for one in found if one.grade > 0), key=lambda one: -one.grade)


def _judged(
    paths: Sequence[Path],
    files: Mapping[Path, FileHistory],
    steps: set[int],
    first_s: float,
    log_size: int,
) -> Kept:
    sizes = [size for path in paths for size in files[path].after(first_s)]
    numbers = {
        number
        for path in paths
        for number in map(int, _DIGITS.findall(f"{path.parent.name}/{path.name}")[-2:])
        if {number, number - 1} & steps
    }
    bigger = max(sizes) > log_size
    if len(paths) > 1 and len(numbers) > 1:
        grade, why = 3, "their names hold the numbers of steps that were seen"
    elif len(sizes) > 1:
        grade, why = 1 + bigger, f"written {len(sizes)} times after the first step"
    else:
        grade, why = int(bigger), "written once after the first step"
    why += f"; {'bigger' if bigger else 'not bigger'} than the logs"
    if all(files[path].text for path in paths):
        grade, why = grade - 1, f"{why}, and text"
    # all of one shape: their numbers order them
    ordered = sorted(paths, key=lambda path: [int(one) for one in _DIGITS.findall(str(path))])
    return Kept(paths=ordered, grade=grade, why=why)


def places(words: Iterable[str], directory: Path) -> list[Path]:
    """The places that words of a command name, outside its directory."""
    found = []
    for word in words:
        value = word.partition("=")[2] if word.startswith("-") or "=" in word else word
        if "/" not in value or "\0" in value or "$" in value:
            continue
        path = Path(directory, value).resolve()
        if not path.is_file() and path != Path("/") and not path.is_relative_to(directory):
            found.append(path)
    return found


def is_text(path: Path) -> bool:
    """Whether a file begins with text; an empty one, or one that is gone, does not."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(READ)
    except OSError:
        return False
    return bool(data) and not data.translate(None, _TEXT)


def _outermost(roots: Iterable[Path]) -> list[Path]:
    """Without those that lie below another one."""
    found: list[Path] = []
    for root in sorted(roots, key=lambda root: len(root.parts)):
        if not any(root.is_relative_to(other) for other in found):
            found.append(root)
    return found
