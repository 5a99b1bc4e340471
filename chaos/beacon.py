"""Tells a chaos run how far training is: one line in a training script, and nothing at all outside a run.

    from chaos import beacon
    beacon.step(step, loss=loss.item(), samples=len(batch))

Standard library only; the file may also be copied beside a script whose environment lacks this package. Outside a
run a call is one look-up. In a run it appends one short line to a file in a single write: it never blocks on the
harness, never raises, and takes a few microseconds.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache

VARIABLE = "CHAOS_BEACON"
"""Environment variable that names the file to append to; set by the harness."""
VERSION = 1


def step(step: int, *, loss: float | None = None, samples: int | None = None) -> None:
    """Say that training step ``step`` is done.

    ``loss``: of the step; a tensor works too, if its ``float()`` costs you nothing. ``samples``: that this
    process used in the step. Any rank may call it, or only one: a step counts as done when the first says so.
    """
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    try:
        fd, who = _open(path, os.getpid())
        what = f" {int(step)} {'-' if loss is None else repr(float(loss))} {'-' if samples is None else int(samples)}\n"
        os.write(fd, f"{VERSION} {time.monotonic_ns()}{who}{what}".encode())
    except Exception:  # a report must never harm the training it reports on
        return


@lru_cache(maxsize=4)
def _open(path: str, pid: int) -> tuple[int, str]:
    """The open file, and the part of a line that says who writes. Cached for each process, forked ones included."""
    rank = next(
        (v for n in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") if (v := os.environ.get(n))), "-"
    )
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
    return fd, f" {pid} {rank if rank.isdigit() else '-'}"
