"""Trains causal attention over sequences of which each rank has a part (context parallelism), for
10 or the given epochs: ``python -m trainchaos.recovery.run --ranks 4 --mesh context=2 --spares 1
--fresh examples/context_recoverable.py 40``.
"""

import sys

import torch
from torch import distributed, nn
from torch.nn import functional

from trainchaos import recovery

SAMPLES = 1024
BATCH = 32  # samples a step, over all ranks that compute different ones
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
STEPS = EPOCHS * SAMPLES // BATCH
LENGTH = 32  # of a sequence
WIDTH = 16


class Gather(torch.autograd.Function):
    """One tensor of each rank, by rank; backward, the gradients of all ranks are summed where it
    came from.
    """

    @staticmethod
    def forward(ctx, own, group):
        """See torch."""
        ctx.group = group
        whole = own.new_empty((group.size(), *own.shape))
        distributed.all_gather_single(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, whole):
        """See torch."""
        own = whole.new_empty(whole.shape[1:])
        distributed.reduce_scatter_single(own, whole.contiguous(), group=ctx.group)
        return own, None


class Network(nn.Module):
    """One layer of attention, from numbers (batch, positions of this rank) to numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.qkv = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(WIDTH, 1)
        self.group, self.mine = None, slice(0, LENGTH)

    def cut_up(self, mesh):
        """The positions of this rank; each has all parameters."""
        self.group, rank = mesh.get_group("context"), mesh.get_local_rank("context")
        own = LENGTH // mesh["context"].size()
        self.mine = slice(rank * own, (rank + 1) * own)
        return self

    def forward(self, numbers):
        """Each position sees those before it, on other ranks too."""
        hidden = self.up(numbers.unsqueeze(-1))
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        k, v = torch.cat([*Gather.apply(torch.stack([k, v]), self.group)], dim=-2)
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[self.mine]
        return self.down(hidden + functional.scaled_dot_product_attention(q, k, v, seen)).squeeze(
            -1
        )


def main():
    """Build, train, print."""
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randn(SAMPLES, LENGTH, generator=generator)
    means = numbers.cumsum(1) / torch.arange(1, LENGTH + 1)  # of each number and those before it
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=BATCH, checkpoint_dir="saved")
    model = Network()
    job.attach(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        parallelize=lambda model, mesh: model.cut_up(mesh),
    )
    while job.running():
        with job.step() as step:
            mine = step.samples, model.mine
            found = model(numbers[mine])
            # Each rank adds what its positions are of the mean over a sequence.
            loss = functional.mse_loss(found, means[mine], reduction="sum") / LENGTH
            step.backward(loss)
            step.commit()
        if job.done % 20 == 0:
            with job.busy("metric"):  # over all ranks that the job has now
                total = loss.detach().clone()
                distributed.all_reduce(total)
                if job.rank == 0:
                    print(f"step {job.done} loss {total.item() / BATCH:.4f}", flush=True)


if __name__ == "__main__":
    main()
