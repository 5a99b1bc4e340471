"""Trains a network whose layers are computed by two ranks each (tensor parallelism), for 10 or the
given epochs: ``python -m trainchaos.recovery.run --ranks 4 --mesh tensor=2 --spares 1 --fresh
examples/mesh_recoverable.py 40``.
"""

import sys

import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainchaos import recovery

SAMPLES = 1024
BATCH = 32  # samples a step, over all ranks that compute different ones
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
STEPS = EPOCHS * SAMPLES // BATCH
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # of a block


def network():
    """Two blocks of a wide and a narrow layer each, and an output."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def cut_up(model, mesh):
    """This rank's part; each process makes it alone, of the whole model that it has built."""
    for block in model[:2]:
        parallelize_module(block, mesh["tensor"], PLAN, src_data_rank=None)
    return model


def adam(parameters):
    """One by one: torch works on no lists of which some parameters are DTensors and some are not,
    as it would on a GPU.
    """
    return torch.optim.AdamW(parameters, lr=3e-3, foreach=False)


def main():
    """Build, train, print."""
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(SAMPLES, 8, generator=generator)
    heights = torch.sin(points @ torch.linspace(-1, 1, 8)).unsqueeze(1)
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=BATCH, checkpoint_dir="saved")
    points, heights = points.to(job.device), heights.to(job.device)
    model = network().to(job.device)
    job.attach(model, adam, parallelize=cut_up)
    while job.running():
        with job.step() as step:
            loss = nn.functional.mse_loss(model(points[step.samples]), heights[step.samples])
            step.backward(loss * len(step.samples))
            step.commit()
        if job.done % 20 == 0:
            with job.busy("metric"):  # over all ranks that the job has now
                mean = loss.detach().clone()
                distributed.all_reduce(mean, distributed.ReduceOp.AVG)
                if job.rank == 0:
                    print(f"step {job.done} loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
