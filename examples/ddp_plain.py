"""Trains a small network with several ranks on synthetic data, for 10 or the given epochs."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data

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
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = network()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = 0
    sampler = data.DistributedSampler(dataset)
    loader = data.DataLoader(dataset, BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"loss {loss.item():.4f}", flush=True)
                torch.save(model.state_dict(), "ddp-model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
