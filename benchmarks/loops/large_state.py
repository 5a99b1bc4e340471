"""Trains a model of a given size that costs nearly nothing to compute, so that the state dominates:
a loop of anybody's that takes part in recovery.

    large_state.py MB STEPS PAUSE_S

The state is the parameters and as many bytes of the optimizer's (SGD with momentum), MB (10^6
bytes) together. Each step takes PAUSE_S seconds besides, as a device would that the host waits for.
"""

import sys
import time

import torch
from torch import nn

from trainchaos import recovery

SAMPLES, BATCH = 4096, 4
PIECE = 4_000_000  # elements of a parameter, at most
MB, STEPS, PAUSE_S = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Large(nn.Module):
    """Parameters whose gradient is the input itself."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        sizes = [min(PIECE, elements - start) for start in range(0, elements, PIECE)]
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """The sum of all, times ``factor``."""
        return sum(part.sum() for part in self.parts) * factor  # type: ignore[return-value]


def main() -> None:
    """Build and train."""
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=BATCH, checkpoint_dir="saved")
    model = Large(int(MB * 1e6 / 8)).to(job.device)
    job.attach(model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9))
    while job.running():
        with job.step() as step:
            time.sleep(PAUSE_S)
            factor = torch.tensor([float(sample % 7) for sample in step.samples]).sum()
            step.backward(model(factor) * 1e-3)
            step.commit()


if __name__ == "__main__":
    main()
