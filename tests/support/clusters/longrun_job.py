"""A tiny job that is told to fail: SIGUSR1 has the rank raise an exception, SIGUSR2 has it compute
one NaN. In the folder that it is given, if any, ``heap.PID`` says how many bytes a process uses of
its heap.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.clusters.heap import tell_heap
from trainchaos import recovery
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.rank import generation as module

COLLECTIVE_TIMEOUT_S = 20.0
STEPS = 1_000_000_000
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
