"""What it costs that a step can be put back: the time of each attempt's beginning, its look at
buffers for NaN, and its end, as a share of the step, in the same run.

``python -m benchmarks.loops.attempts``: two models, a rank alone, on this machine's CPU.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from benchmarks.harness import markdown, seconds, spread
from trainchaos.recovery.state.state import TrainState

STEPS, WARM = 40, 5


class Constant(nn.Module):
    """A gigabyte of buffers that never change."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        for place in range(4):
            self.register_buffer(f"table{place}", torch.zeros(1 << 26))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Plain layers."""
        return self.body(x)  # type: ignore[no-any-return]


def normalised() -> nn.Module:
    """50 layers of BatchNorm, as in ResNet-50, with its widths."""
    widths = [64] * 10 + [128] * 13 + [256] * 18 + [512] * 9
    layers: list[nn.Module] = []
    for before, width in zip([64, *widths], widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
    return nn.Sequential(*layers)


def measured(model: nn.Module, inputs: torch.Tensor) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of what belongs to putting it back."""
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1e-4), None, seed=1)
    steps, costs = [], []
    for _ in range(STEPS + WARM):
        began = time.perf_counter()
        spent = seconds(state.attempt.begin)
        state.optimizer.zero_grad()
        model(inputs).square().mean().backward()
        spent += seconds(state.attempt.spoilt) + seconds(state.attempt.applied)
        state.apply(0.0)
        steps.append(time.perf_counter() - began)
        costs.append(spent)
    return steps[WARM:], costs[WARM:]


def main() -> None:
    """Print the table."""
    rows = []
    for name, model, inputs in (
        ("50 BatchNorm layers", normalised(), torch.randn(2, 64, 16, 16)),
        ("1 GB of constant buffers", Constant(), torch.randn(256, 1024)),
    ):
        steps, costs = measured(model, inputs)
        share = median(costs) / median(steps)
        rows.append([name, f"{median(steps) * 1e3:.1f}", spread(costs, 3, 1e3), f"{share:.2%}"])
    print(markdown(["model", "step, ms", "put back, ms", "share"], rows))


if __name__ == "__main__":
    main()
