"""How a generation ends: the error that a lost peer or an abort raises, and what is not one."""

from __future__ import annotations

import torch
import torch.distributed as dist

DEVICE_ERRORS = tuple(
    kind
    for kind in (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", None))
    if kind is not None
)
"""An error that joining another generation cannot cure: its device fails the rank, not a peer."""


class GenerationLost(Exception):
    """This generation cannot go on: a peer is gone, the link broke, or the supervisor
    aborted it.
    """


def first_line(error: Exception) -> str:
    """What an error says, cut to a line."""
    return str(error).split("\n", 1)[0][:200]


def require_no_group() -> None:
    """Raise RuntimeError if the process has a default process group."""
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed.init_process_group was called: the job makes the default process"
            " group and its mesh; leave the call out, and use job.mesh"
        )


def lost_in(error: BaseException | None) -> GenerationLost | None:
    """The lost generation that another error was raised for, as torch's schedules do."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, GenerationLost):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
