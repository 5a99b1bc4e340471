"""The recovery stack: detection, strategies, mechanisms. Usable without the harness: see ``docs/recovery.md``.

Public names: ``join``, ``Job`` and ``Step`` (what a training script holds), ``JoinError``. ``Job`` and ``Step`` are
imported with torch, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recovery.joining import JoinError, join

if TYPE_CHECKING:
    from recovery.job import Job
    from recovery.mechanisms.step import Step

__all__ = ["Job", "JoinError", "Step", "join"]


def __getattr__(name: str) -> Any:
    if name == "Job":
        from recovery.job import Job

        return Job
    if name == "Step":
        from recovery.mechanisms.step import Step

        return Step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
