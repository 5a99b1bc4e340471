"""Follows the files of a command while it is watched, and tells checkpoints by what happens to
them, whatever their names are.

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
LOOK_EVERY_S = 0.5
REST = 20.0
"""A look is not taken again before this many times the time that it took."""
_TEXT = bytes({*range(32, 256), *b"\t\n\r\f\b\x1b"})
_NO_STATE = re.compile(r"\.(?:png|jpe?g|gif|svg|html?|pdf|md|tsv|lock|tmp|pid)$", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
SURE = {3: "surely checkpoints", 2: "probably checkpoints", 1: "perhaps checkpoints"}
"""How sure it is, in words."""

Listing = Mapping[Path, tuple[int, int]]
"""Files -> (time of the last change, size)."""


@dataclass(kw_only=True)
class FileHistory:
    """One file that changed. ``writes``: seconds since the start at which it was seen changed, each
    with its size; ``text``: it holds text.
    """

    writes: list[tuple[float, int]] = field(default_factory=list)
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
    """The files below some directories. ``before``: those that were there; ``files``: those that
    changed since.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots: list[Path] = []
        for root in sorted(roots, key=lambda root: len(root.parts)):
            if not any(root.is_relative_to(other) for other in self._roots):
                self._roots.append(root)
        self.before = self._last = self._listing()
        self._due_s = 0.0
        self.files: dict[Path, FileHistory] = {}

    def look(self, seconds: float, *, at_once: bool = False) -> None:
        """Note what has changed. ``seconds``: since the start."""
        if seconds < self._due_s and not at_once:
            return
        began, now = time.monotonic(), self._listing()
        for path, state in now.items():
            if self._last.get(path) != state:
                known = self.files.setdefault(path, FileHistory())
                known.writes.append((seconds, state[1]))
                known.text = is_text(path)
        self._last = now
        self._due_s = seconds + max(LOOK_EVERY_S, REST * (time.monotonic() - began))

    def _listing(self) -> Listing:
        return {path: state for root in self._roots for path, state in listed(root)}


def listed(root: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """What lies below a directory now; links are not followed."""
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
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth < MOST_DEPTH and entry.name not in LEFT_OUT:
                        waiting.append((Path(entry.path), depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), (state.st_mtime_ns, state.st_size)
            except OSError:  # it went meanwhile
                continue


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
            flags = re.search(r"(?m)^flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{fd}").read_text())
        except OSError:
            continue
        odd = target.startswith(("/dev/", "/proc/", "/sys/")) or target.endswith(" (deleted)")
        writes = flags is not None and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR)
        if target.startswith("/") and not odd and writes:
            yield Path(target)


def is_text(path: Path) -> bool:
    """Whether a file begins with text; an empty one, or one that is gone, does not."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(4096)
    except OSError:
        return False
    return bool(data) and not data.translate(None, _TEXT)


def places(words: Iterable[str], directory: Path) -> list[Path]:
    """The places that words of a command name, outside its directory."""
    named = []
    for word in words:
        value = word.partition("=")[2] if word.startswith("-") or "=" in word else word
        if "/" not in value or "\0" in value or "$" in value:
            continue
        path = Path(directory, value).resolve()
        if not path.is_file() and path != Path("/") and not path.is_relative_to(directory):
            named.append(path)
    return named


def named_checkpoints(paths: Iterable[Path], root: Path) -> list[Path]:
    """Those of the files that hold checkpoints, by their names below ``root``."""

    def holds(path: Path) -> bool:
        name = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
        return bool(CHECKPOINT.search(name)) and not NO_CHECKPOINT.search(name)

    return [path for path in paths if holds(path)]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Files of one kind that look like checkpoints. ``grade``: how surely, see ``SURE``; ``why``:
    in words.
    """

    paths: Sequence[Path]
    grade: int
    why: str

    @property
    def how_sure(self) -> str:
        """For people."""
        return f"{SURE[self.grade]}, by what changed: {self.why}"


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
    for path, history in files.items():
        if history.appended or NO_CHECKPOINT.search(path.name):
            logs.append(max(size for _, size in history.writes))
        elif history.after(first_s) and not _NO_STATE.search(path.name):
            families.setdefault(_DIGITS.sub("#", str(path)), []).append(path)
    seen = set(steps)
    judged = [_judged(paths, files, seen, first_s, max(logs)) for paths in families.values()]
    return sorted((one for one in judged if one.grade > 0), key=lambda one: -one.grade)


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
