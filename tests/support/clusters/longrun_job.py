"""A tiny job that is told to fail: SIGUSR1 has the rank raise an exception, SIGUSR2 has it compute
one NaN. In the folder that it is given, if any, ``heap.PID`` says how many bytes a process uses of
its heap.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from trainchaos import recovery
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.rank import generation as module

COLLECTIVE_TIMEOUT_S = 20.0
STEPS = 1_000_000_000
BLOCK_BYTES = 64  # of Python's own small blocks, which the C library does not see; roughly
ASKED = {"raise": False, "nan": False}


class HastyGroup(Group):
    """An operation that lost its wake-up ends after 20 s and not a day: a run of minutes shows what
    comes then.
    """

    def __init__(self, **said: Any) -> None:
        super().__init__(**{**said, "collective_timeout_s": COLLECTIVE_TIMEOUT_S})


class Asked(Exception):
    """By a signal."""


def ask(signum: int, _: object) -> None:
    """A signal came: the next step does as it says."""
    ASKED["raise" if signum == signal.SIGUSR1 else "nan"] = True


class Mallinfo2(ctypes.Structure):
    """What the C library has given out, in bytes (mallinfo(3), glibc 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def tell_heap(at: Path) -> None:
    """What is in use. Resident memory would count what the C library keeps of freed memory too: up
    to 20 MiB more, as threads come and go in as many arenas.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    found = libc.mallinfo2()
    new = at.with_name(f"{at.name}.new")
    small = sys.getallocatedblocks() * BLOCK_BYTES
    new.write_text(str(found.uordblks + found.hblkhd + small))
    new.rename(at)


def main() -> None:
    """Train until somebody ends it."""
    heaps = [Path(folder, f"heap.{os.getpid()}") for folder in sys.argv[1:]]
    module.Group = HastyGroup  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, ask)
    signal.signal(signal.SIGUSR2, ask)
    job = recovery.join(samples=256, steps=STEPS, global_batch=12)
    torch.manual_seed(job.seed)
    model = torch.nn.Linear(16, 8)
    job.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    while job.running():
        with job.step() as step:
            loss = model(torch.randn(len(step.samples), 16)).square().mean()
            if ASKED["raise"]:
                raise Asked
            if ASKED["nan"]:
                ASKED["nan"], loss = False, loss * float("nan")
            step.backward(loss * len(step.samples))
            step.commit()
        for heap in heaps:
            tell_heap(heap)


if __name__ == "__main__":
    main()
