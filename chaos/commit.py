"""Which commit of this program runs. ``setup.py`` reads it too, so that it imports nothing of
ours.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

FILE = "commit.txt"
"""Beside this file in what was built from a checkout; a checkout has none."""
GIT_LIMIT_S = 10.0


def commit_of(root: Path) -> str:
    """The commit of a checkout, with a + if tracked files differ from it; empty for any other
    folder, even one inside a checkout of something else, such as site-packages.
    """
    if not (root / ".git").exists():
        return ""
    try:
        outputs = [
            subprocess.run(
                ["git", "-C", str(root), *words],
                capture_output=True,
                text=True,
                timeout=GIT_LIMIT_S,
                check=True,
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return ""
    return outputs[0] + ("+" if outputs[1] else "")


def built_from() -> str:
    """The commit that this installation was built from; empty if it was not stored."""
    try:
        return Path(__file__).with_name(FILE).read_text().strip()
    except (OSError, ValueError):
        return ""
