"""What the examples of this folder share: a small model, its samples, and where checkpoints are."""

import os
import time
from pathlib import Path

import torch

STEPS = int(os.environ.get("CHAOS_STEPS", "40"))
RANKS = int(os.environ.get("CHAOS_RANKS", "2"))
SAVE_EVERY = 10
BATCH = 16
CHECKPOINTS = Path(os.environ.get("CHAOS_SCRATCH", ".")) / "checkpoints"


def model() -> torch.nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


class Samples(torch.utils.data.Dataset):
    """As many as all ranks need for all steps; ``times`` over if a step has several batches."""

    def __init__(self, times: int = 1) -> None:
        self.size = STEPS * RANKS * BATCH * times

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.04 / BATCH)  # as long as it takes to read one
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(dim=0, keepdim=True).sin()}


def batches(first_step: int, rank: int) -> torch.utils.data.DataLoader:
    """The batches of one rank, from a step on."""
    samples = Samples()
    own = [
        index
        for step in range(first_step - 1, STEPS)
        for index in range((step * RANKS + rank) * BATCH, (step * RANKS + rank + 1) * BATCH)
    ]
    return torch.utils.data.DataLoader(torch.utils.data.Subset(samples, own), batch_size=BATCH)
