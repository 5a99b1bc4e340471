"""The job whose ranks ``benchmarks.gpu`` kills: a GPT on random tokens, on the device given by the
supervisor.

python -m trainchaos.recovery.run --ranks 2 benchmarks/gpu/train.py SIZE BATCH
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.model import LENGTHS, make_model, make_optimizer, tokens_of
from trainchaos import recovery

STEPS = 100_000  # stopped long before
SAMPLES = 1 << 16


def main() -> None:
    """Train until the supervisor ends it."""
    size, batch = sys.argv[1], int(sys.argv[2])
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=batch, seed=1)
    torch.manual_seed(job.seed)
    model = make_model(size).to(job.device)
    job.attach(model, make_optimizer, clip_norm=1.0)
    kind = torch.device(job.device).type

    def loss_of(samples: list[int]) -> Tensor:
        tokens = tokens_of(samples, LENGTHS[size]).to(job.device)
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        return loss / LENGTHS[size]

    while job.running():
        with job.step() as step:
            step.backward(loss_of(step.samples))
            step.commit()


if __name__ == "__main__":
    main()
