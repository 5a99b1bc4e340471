"""Which samples make a loss or gradient non-finite, whoever computes them: each is computed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from recovery.mechanisms.reduce import GradientReducer

if TYPE_CHECKING:
    from recovery.job import Job
    from recovery.mechanisms.step import Step

LossOf = Callable[[list[int]], Tensor]
"""The summed loss of these samples, computed as in training."""
MAX_CONTROLS = 3


def spoilt_samples(
    loss_of: LossOf, reducer: GradientReducer, samples: Sequence[int], others: Sequence[int],
    prepare: Callable[[], None],
) -> list[int]:  # fmt: skip
    """Those of ``samples`` that are non-finite by themselves, loss or gradient. ``prepare`` comes before each.

    None of them when up to three of ``others``, which are not suspected, are non-finite too: then the rank's state
    is to blame, and its samples are not. Changes the gradients, and nothing else.
    """
    controls = list(others)[:MAX_CONTROLS]
    if controls and not any(_is_finite(loss_of, reducer, sample, prepare) for sample in controls):
        return []
    found = [sample for sample in samples if not _is_finite(loss_of, reducer, sample, prepare)]
    # Without anything to compare with, a rank all of whose samples fail is more likely to be broken itself.
    return [] if not controls and len(found) == len(samples) else found


def samples_to_blame(job: Job, step: Step, blamed: tuple[int, ...]) -> list[int]:
    """Which of this rank's samples are non-finite by themselves, when redoing the step did not help; else none."""
    loss_of = job.loss_of
    if job.rank not in blamed or step.number != job.examine or loss_of is None:
        return []

    def prepare() -> None:
        job.marks.touch()
        job.state.seed_step(job.rank, step.number)

    def alone(samples: list[int]) -> Tensor:
        loss = loss_of(samples)
        return loss if job.spoil is None else job.spoil(samples, loss)

    others = [sample for sample in job.due(step.number) if sample not in step.samples]
    return spoilt_samples(alone, job.reducer, step.samples[: step.count], others, prepare)


def _is_finite(loss_of: LossOf, reducer: GradientReducer, sample: int, prepare: Callable[[], None]) -> bool:
    prepare()
    reducer.rehearse()
    loss = loss_of([sample])
    if not math.isfinite(float(loss.detach())):
        return False
    loss.backward()
    return reducer.all_finite()
