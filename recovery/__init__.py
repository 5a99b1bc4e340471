"""The recovery stack: detection, strategies, mechanisms. Usable without the harness: see
``docs/recovery.md``.

Public names: ``join``, ``Job`` and ``Step`` (used by a training script), ``JoinError``, and for
``job.register`` ``Attributes`` and ``keep_type``. They are imported on first use, because most
import torch: importing another module of this package, as ``chaos --help`` does, stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job
    from trainchaos.recovery.rank.joining import JoinError, join
    from trainchaos.recovery.rank.step import Step
    from trainchaos.recovery.state.registered import Attributes
    from trainchaos.recovery.state.typed import keep_type

_WHERE = {
    "Attributes": "state.registered",
    "Job": "rank.job",
    "JoinError": "rank.joining",
    "Step": "rank.step",
    "join": "rank.joining",
    "keep_type": "state.typed",
}
__all__ = ["Attributes", "Job", "JoinError", "Step", "join", "keep_type"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"trainchaos.recovery.{_WHERE[name]}"), name)
