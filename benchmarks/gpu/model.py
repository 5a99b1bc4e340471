"""Models of the GPU benchmark: GPT-2 small (124 million parameters), and a tiny one for
rehearsals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainchaos.harness.workloads._transformer import Transformer

VOCABULARY = {"124m": 50_257, "tiny": 256}
LENGTHS = {"124m": 512, "tiny": 32}
BATCH = {"124m": 8, "tiny": 8}


def make_model(size: str) -> nn.Module:
    """Make the model, on the CPU."""
    layers, heads, width = {"124m": (12, 12, 768), "tiny": (2, 2, 32)}[size]
    return Transformer(
        vocabulary=VOCABULARY[size],
        layers=layers,
        heads=heads,
        width=width,
        block=LENGTHS[size],
        dropout=0.0,
    )


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with torch's defaults: it counts its steps on the CPU."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def tokens_of(samples: Sequence[int], length: int) -> Tensor:
    """Random tokens (samples, length + 1), the same for the same sample."""
    rows = [
        torch.randint(0, 256, (length + 1,), generator=torch.Generator().manual_seed(sample))
        for sample in samples
    ]
    return torch.stack(rows)
