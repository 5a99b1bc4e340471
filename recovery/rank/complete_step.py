"""A step that some ranks have applied and others have not, though their gradients are complete.

The last collective of a sharded step may end on some ranks only. Those that did not get its result
hold everything but that: the others tell it in the next generation, so that no shard is left a step
behind the others.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from recovery.collectives.group import GenerationLost, Group
from recovery.collectives.reduce import Reduced


def noted(step: int, reduced: Reduced) -> list[float]:
    """What is kept of a step that was applied."""
    return [float(step), reduced.loss, float(reduced.samples), reduced.grad_norm]


def told(step: int, last: list[float], group: Group, device: str) -> Reduced:
    """What all ranks knew when ``step`` was applied; every rank of the group takes part. ``last``:
    what this one has noted. Raises GenerationLost, also when nobody knows.
    """
    known = last[1:] if last and last[0] == step else [-math.inf] * 3
    word = torch.tensor(known, dtype=torch.float64, device=device)
    everyone = group.everyone
    # The largest is taken and not a sum: the values are to be the same to the last bit.
    everyone.wait(everyone.start_all_reduce(word, dist.ReduceOp.MAX))
    loss, samples, norm = everyone.read(word)
    if samples < 0:
        raise GenerationLost(f"nobody knows how step {step} ended")
    return Reduced(loss=loss, samples=round(samples), pause=False, blamed=(), grad_norm=norm)
