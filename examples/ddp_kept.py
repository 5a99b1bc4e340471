"""Trains a small network with several ranks on synthetic data, for 10 or the given epochs."""

import sys

import torch
from torch import nn
from torch.utils import data

from trainchaos import recovery

SAMPLES = 1024
BATCH = 32  # samples a step, over all ranks
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
STEPS = EPOCHS * SAMPLES // BATCH


class Waves(data.Dataset):
    """Points of eight variables, and the height of a wave there."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(SAMPLES, 8, generator=generator)
        self.heights = torch.sin(self.points @ torch.linspace(-1, 1, 8)).unsqueeze(1)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.points[index], self.heights[index]


def network():
    """Three layers, and dropout, so that random numbers matter too."""
    return nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def main():
    """Build, train, save."""
    dataset = Waves()
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=BATCH, checkpoint_dir="saved")
    torch.manual_seed(1)
    model = network()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    job.attach(model, optimizer, scheduler)
    while job.running():
        with job.step() as step:
            inputs, targets = data.default_collate([dataset[i] for i in step.samples])
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            step.commit()
            if job.rank == 0 and step.number % 20 == 0:
                print(f"loss {loss.item():.4f}", flush=True)
                torch.save(model.state_dict(), "ddp-model.pt")


if __name__ == "__main__":
    main()
