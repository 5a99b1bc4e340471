"""Finds the samples that make a loss or gradient non-finite on any rank, by computing each of them
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.reduce import Reducer
from trainchaos.recovery.data.order import blamed_share
from trainchaos.recovery.rank.step import JobContext, LossOf, Step
from trainchaos.recovery.transport.wire import MOST_BLAMED

MAX_CONTROLS = 3


def spoilt_samples(
    loss_of: LossOf,
    reducer: Reducer,
    samples: Sequence[int],
    others: Sequence[int],
    prepare: Callable[[], None],
    agree: Callable[[bool], bool] | None = None,
) -> list[int]:
    """The samples that are non-finite by themselves, in loss or gradient. ``prepare`` is called
    before each.

    Empty when up to three of ``others``, which are not suspected, are non-finite too: then the
    rank's state is to blame, not its samples. Changes only the gradients.

    With ``agree`` (whether all ranks pass true) all ranks compute each sample, at the same time.
    """
    controls = list(others)[:MAX_CONTROLS]
    finite = partial(_is_finite, loss_of, reducer, prepare, agree)
    if controls and not any(finite(sample) for sample in controls):
        return []
    found = [sample for sample in samples if not finite(sample)]
    # With no other sample to compare, a rank whose samples all fail is more likely broken itself.
    return [] if not controls and len(found) == len(samples) else found


def samples_to_blame(job: JobContext, step: Step, blamed: tuple[int, ...]) -> list[int]:
    """The samples of this rank that are non-finite by themselves, after redoing the step did not
    help; else none. All of its samples, where the job leaves out the share of the rank to blame and
    that share fits in one message. The number of single samples is bounded: the job ends at far
    fewer.
    """
    if job.config.nonfinite == "skip" and step.number != job.examine:
        return blamed_share(
            step.samples[: step.count],
            rank=job.rank,
            blamed=blamed,
            world=job.world,
            alike=job.arranged.alike,
            most=MOST_BLAMED,
        )
    loss_of = job.loss_of
    if step.number != job.examine or loss_of is None:
        return []
    sharded = job.reducer if job.layout.shards > 1 else None
    if sharded is None and job.rank not in blamed:
        return []

    def prepare() -> None:
        job.marks.touch()
        job.state.attempt.undo()
        job.state.attempt.begin()
        job.state.seed_step(job.arranged.draws(job.rank), step.number)

    def alone(samples: list[int]) -> Tensor:
        loss = loss_of(samples)
        return loss if job.spoil is None else job.spoil(samples, loss)

    mine = step.samples[: step.count]
    suspects = (
        mine
        if sharded is None
        else [sample for rank in blamed for sample in _share(job, step.number, rank)]
    )
    suspected = set(suspects)
    others = [sample for sample in job.due(step.number) if sample not in suspected]
    # A rank with a part of the model computes nothing alone: all ranks compute, and each reports
    # its own samples.
    agree = sharded.agree if sharded is not None else None
    try:
        with _statistics_stand_still(job.state.model):
            found = spoilt_samples(alone, job.reducer, suspects, others, prepare, agree)
    except GenerationLost:
        return []  # a rank has failed, and this one parks anyway
    own = set(mine) if job.rank in blamed else set[int]()
    return [sample for sample in found if sample in own][:MOST_BLAMED]


@contextmanager
def _statistics_stand_still(model: nn.Module) -> Iterator[None]:
    """Layers that normalise by the statistics of a batch use those they have learned: a batch of
    one has none. All else computes as in training.
    """
    layers = [m for m in model.modules() if getattr(m, "track_running_stats", False)]
    training = [layer for layer in layers if layer.training]
    for layer in training:
        layer.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.train()


def _share(job: JobContext, number: int, rank: int) -> list[int]:
    batches = job.micro_batches(number, rank)
    return [sample for batch in batches for sample in batch.samples[: batch.count]]


def _is_finite(
    loss_of: LossOf,
    reducer: Reducer,
    prepare: Callable[[], None],
    agree: Callable[[bool], bool] | None,
    sample: int,
) -> bool:
    prepare()
    reducer.rehearse()
    loss = loss_of([sample])
    finite = math.isfinite(float(loss.detach()))
    if finite or agree is not None:  # the other ranks wait for this one in the midst of the pass
        loss.backward()
        finite = finite and reducer.all_finite()
    return finite if agree is None else agree(finite)
