"""A tiny job whose ranks wait at gates, files in the working directory: before they join, and
before they take a peer's state. An argument sets the number of steps.

``<gate>.shut``: who comes waits until it is gone, or until ``<gate>.go.<pid>`` is there; each says
by ``<gate>.held.<pid>`` that it waits, and by ``<gate>.passed.<pid>`` that it goes on.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from trainchaos import recovery

STEP_S = 0.01  # at least: it is to outlast what the test does to it, on a fast machine too
JOINING, LOADING = "joining", "loading"


def gate(name: str) -> None:
    """Wait while it is shut."""
    shut, go = Path(f"{name}.shut"), Path(f"{name}.go.{os.getpid()}")
    pause = threading.Event()
    if shut.exists():
        Path(f"{name}.held.{os.getpid()}").touch()
        while shut.exists() and not go.exists():
            pause.wait(0.005)
        Path(f"{name}.passed.{os.getpid()}").touch()


class Gated(torch.optim.lr_scheduler.ConstantLR):
    """Part of the state, the last of it that is put in place."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Whoever takes a peer's state is held, if anybody is."""
        gate(LOADING)
        super().load_state_dict(state_dict)


def main() -> None:
    """Train."""
    gate(JOINING)
    pause = threading.Event()
    job = recovery.join(
        samples=256, steps=int(sys.argv[1]), global_batch=12, checkpoint_dir="checkpoints"
    )
    torch.manual_seed(job.seed)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    job.attach(model, optimizer, Gated(optimizer, factor=1.0))
    while job.running():
        with job.step() as step:
            pause.wait(STEP_S)
            step.backward(
                model(torch.randn(len(step.samples), 64)).square().mean() * len(step.samples)
            )
            step.commit()


if __name__ == "__main__":
    main()
