"""Finds the file into which a command prints its steps, where its output does not show them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trainchaos.harness.draft.watching.changes import is_text
from trainchaos.harness.draft.watching.watch import Sighting
from trainchaos.harness.script.listen.derive import derive

MOST_FILES = 64
MOST_LOOKED = 1 << 16  # bytes in which steps are looked for, of each file and each second
MOST_TEXT = 1 << 18  # bytes read of the one that has most
LEAST_STEPS = 2
_OF_A_START = re.compile(r"\d[\d_:.T-]*\d{2}(?!\d)|(?<=version_)\d+")
"""A date, a time, a process, or a count of runs."""


def log_of_steps(paths: Iterable[Path]) -> tuple[Path, int] | None:
    """Of these files the one whose lines show most steps, and how many; None if none does."""
    found = ((path, _steps(path)) for path in sorted(paths)[:MOST_FILES] if is_text(path))
    return max(
        (one for one in found if one[1] >= LEAST_STEPS), key=lambda one: one[1], default=None
    )


def named(path: Path, seen: Sighting, directory: Path) -> str:
    """A file as a scenario names it: numbers that are others in each start are left open."""
    place, front = (seen.scratch, "$CHAOS_SCRATCH/") if seen.scratch else (directory, "")
    if not path.is_relative_to(place):
        place, front = directory, ""
    name = str(path.relative_to(place) if path.is_relative_to(place) else path)
    old = path in seen.before.files
    return front + (name if old else _OF_A_START.sub("*", name))


def as_printed(path: Path, seen: Sighting) -> Sighting:
    """What was seen, as if the lines of a file had been printed in place of the output."""
    with open(path, "rb") as stream:
        start = seen.before.files.get(path, (0, 0))[1]
        start = stream.seek(start if start < path.stat().st_size else 0)
        rows = stream.read(MOST_TEXT).decode(errors="replace").splitlines(keepends=True)
    writes = seen.files[path].writes if path in seen.files else []
    lines: deque[tuple[float, str]] = deque(maxlen=seen.lines.maxlen)
    for row in rows:
        start += len(row.encode())
        lines.append((next((at for at, size in writes if size >= start), seen.seconds), row))
    return replace(seen, lines=lines, count=len(rows))


def _steps(path: Path) -> int:
    """How many steps its lines show, as far as the word beside them says that they are steps."""
    try:
        with open(path, "rb") as stream:
            text = stream.read(MOST_LOOKED).decode(errors="replace")
    except OSError:
        return 0
    seen = derive(text.splitlines())
    return seen.steps if seen is not None and seen.sure else 0
