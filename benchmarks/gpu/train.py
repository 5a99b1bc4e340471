"""The job whose ranks ``benchmarks.gpu`` kills: GPT-2 small (124 million parameters), or a tiny one
for rehearsals, on random tokens, on the device given by the supervisor.

python -m trainchaos.recovery.run --ranks 2 benchmarks/gpu/train.py SIZE BATCH
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainchaos import recovery
from trainchaos.harness.workloads._transformer import Transformer

STEPS = 100_000  # stopped long before
SAMPLES = 1 << 16
BATCH = 8
LENGTHS = {"124m": 512, "tiny": 32}


def make_model(size: str) -> nn.Module:
    """Make the model, on the CPU."""
    layers, heads, width, words = {"124m": (12, 12, 768, 50_257), "tiny": (2, 2, 32, 256)}[size]
    shape = {"layers": layers, "heads": heads, "width": width, "block": LENGTHS[size]}
    return Transformer(vocabulary=words, dropout=0.0, **shape)


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


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The sum of the losses of all tokens."""
    kind = tokens.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )


def main() -> None:
    """Train until the supervisor ends it."""
    size, batch = sys.argv[1], int(sys.argv[2])
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=batch, seed=1)
    torch.manual_seed(job.seed)
    model = make_model(size).to(job.device)
    job.attach(model, make_optimizer, clip_norm=1.0)
    while job.running():
        with job.step() as step:
            tokens = tokens_of(step.samples, LENGTHS[size]).to(job.device)
            step.backward(loss_of(model, tokens) / LENGTHS[size])
            step.commit()


if __name__ == "__main__":
    main()
