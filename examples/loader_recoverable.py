"""As ddp_recoverable.py, with workers that load the data, and the same result however many ranks
are there.

    python -m trainchaos.recovery.run --ranks 4 --strategy drop-replica \
        examples/loader_recoverable.py

Kill ranks while it runs: what they print in the end is the same.
"""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import data

from trainchaos import recovery

SAMPLES = 1024
BATCH = 32  # samples a step, over all ranks
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
STEPS = EPOCHS * SAMPLES // BATCH


class Waves(data.Dataset):
    """Points of eight variables, blurred anew each time, and the height of a wave there."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(SAMPLES, 8, generator=generator)
        self.heights = torch.sin(self.points @ torch.linspace(-1, 1, 8)).unsqueeze(1)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        return index, self.points[index] + 0.01 * torch.randn(8), self.heights[index]


def main():
    """Build, train, say what came of it."""
    job = recovery.join(
        samples=SAMPLES,
        steps=STEPS,
        global_batch=BATCH,
        checkpoint_dir="checkpoints",
        determinism="elastic",
    )
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    job.attach(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    job.register("average", average, update=lambda: average.update_parameters(model))
    loader = job.loader(Waves(), num_workers=2)
    while job.running():
        with job.step() as step:
            for samples in step.batches():
                loaded, inputs, targets = loader.load(samples)
                assert loaded.tolist() == samples
                step.backward(nn.functional.mse_loss(model(inputs), targets, reduction="sum"))
            step.commit()
    if job.rank == 0:
        print(
            "sum of the averaged weights"
            f" {sum(p.double().sum().item() for p in average.parameters())!r}"
        )


if __name__ == "__main__":
    main()
