"""The recovery stack: detection, strategies, mechanisms. Usable without the harness: see
``docs/recovery.md``.

Public names: ``join``, ``Job`` and ``Step`` (used by a training script), ``JoinError``. They are
imported on first use, because ``Job`` and ``Step`` import torch: importing another module of this
package, as ``chaos --help`` does, stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job
    from trainchaos.recovery.rank.joining import JoinError, join
    from trainchaos.recovery.rank.step import Step

__all__ = ["Job", "JoinError", "Step", "join"]


def __getattr__(name: str) -> Any:
    if name in ("JoinError", "join"):
        from trainchaos.recovery.rank import joining

        return joining.join if name == "join" else joining.JoinError
    if name == "Job":
        from trainchaos.recovery.rank.job import Job

        return Job
    if name == "Step":
        from trainchaos.recovery.rank.step import Step

        return Step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
