"""Whether two processes can train together: software versions that have to be the same. Pure."""

from __future__ import annotations

import platform
from collections.abc import Mapping

FORMAT = 5  # of messages and of state copies


def versions(*, torch: str, backend: str, dtype: str) -> dict[str, str]:
    """Of this process. ``dtype``: torch's default one."""
    python = platform.python_version()
    return {
        "python": python,
        "torch": torch,
        "recovery format": str(FORMAT),
        "backend": backend,
        "default dtype": dtype,
    }


def misfit(mine: Mapping[str, str], job: Mapping[str, str]) -> str:
    """What differs from the versions of the job and what would work; empty when nothing does, or
    nothing is known.
    """
    names = [name for name in job if name in mine and mine[name] != job[name]]
    if not names:
        return ""
    differs = ", ".join(f"{name} {mine[name]} where the job has {job[name]}" for name in names)
    return (
        f"{differs}: start it from the environment of the others, or restart the whole job in the"
        " new one"
    )
