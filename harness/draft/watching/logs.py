"""Finds the file into which a command prints its steps, where its output does not show them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainchaos.harness.draft.watching.changes import is_text
from trainchaos.harness.script.listen.derive import derive

MOST_FILES = 64
MOST_TEXT = 1 << 18  # bytes read of a file
LEAST_STEPS = 2


def log_of_steps(paths: Iterable[Path]) -> tuple[Path, int] | None:
    """Of these files the one whose lines show most steps, and how many; None if none does."""
    found = ((path, _steps(path)) for path in sorted(paths)[:MOST_FILES] if is_text(path))
    return max(
        (one for one in found if one[1] >= LEAST_STEPS), key=lambda one: one[1], default=None
    )


def _steps(path: Path) -> int:
    """How many steps its lines show, as far as the word beside them says that they are steps."""
    try:
        with open(path, "rb") as stream:
            text = stream.read(MOST_TEXT).decode(errors="replace")
    except OSError:
        return 0
    seen = derive(text.splitlines())
    return seen.steps if seen is not None and seen.sure else 0
