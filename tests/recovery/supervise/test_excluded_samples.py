"""Leaving out a sample that nobody can compute: the order, the search, the decision, and the rank's
part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recovery.rank.test_job import Rank
from tests.support.fakes.orders import join
from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files.checkpoints import newest_first, verify
from trainchaos.recovery.collectives.reduce import GradientReducer
from trainchaos.recovery.data import order
from trainchaos.recovery.data.exclusion_index import ExclusionIndex
from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Failure,
    Form,
    GiveUp,
    Health,
    ProcessView,
    StateFrom,
    Strategy,
)
from trainchaos.recovery.rank.examine import spoilt_samples
from trainchaos.recovery.rank.step import Step
from trainchaos.recovery.transport.wire import Finished, Joined, LeaveOut, Parked

STRATEGIES = pytest.mark.parametrize(
    "strategy", [CheckpointRestart(), DropReplica(), HotSpare()], ids=repr
)


def view(
    *samples: tuple[int, ...], before: bool = True, dead: bool = False, skipped: int = 0
) -> ClusterView:
    """Three ranks refused step 7; ``samples``: what the blamed ones, from rank 0 on, have named."""
    names = ("w0", "w1", "w2")
    processes = tuple(
        ProcessView(
            name=name,
            role="worker",
            rank=rank,
            step=6,
            valid=True,
            shard=0,
            health=Health.DEAD if dead and rank == 2 else Health.PARKED,
        )
        for rank, name in enumerate(names)
    )
    failures = tuple(
        Failure(
            process=names[rank], rank=rank, cause=Cause.NONFINITE, step=7, time_s=1.0, samples=named
        )
        for rank, named in enumerate(samples)
    )
    return ClusterView(
        now_s=2.0,
        generation=2,
        world=3,
        spares=0,
        members=names,
        processes=processes,
        failures=failures,
        history=failures if before else (),
        skipped=skipped,
    )


def form_of(strategy: Strategy, seen: ClusterView) -> Form | None:
    actions = strategy.on_failure(seen).actions
    return next((action for action in actions if isinstance(action, Form)), None)


@STRATEGIES
def test_samples_that_were_named_are_left_out_from_their_step_on(strategy: Strategy) -> None:
    form = form_of(strategy, view((41,), (17, 9)))
    assert form is not None
    assert (form.skip, form.skip_from) == ((41, 17, 9), 7)
    assert form.refill == (), "the samples are to blame, not whoever computed them"
    assert len(form.members) == 3
    assert (form.state is StateFrom.CHECKPOINT) == isinstance(strategy, CheckpointRestart)
    assert "41, 17, 9" in strategy.on_failure(view((41,), (17, 9))).reason


@STRATEGIES
def test_without_a_name_nothing_is_left_out(strategy: Strategy) -> None:
    for seen in (view(()), view((), before=False)):
        form = form_of(strategy, seen)
        assert form is None or form.skip == ()


@pytest.mark.parametrize("strategy", [DropReplica(), HotSpare()], ids=repr)
def test_somebody_who_died_is_answered_first(strategy: Strategy) -> None:
    form = form_of(strategy, view((41,), dead=True))
    assert form is None or form.skip == ()


@STRATEGIES
def test_there_is_a_limit(strategy: Strategy) -> None:
    almost = fallback.MAX_SKIPPED_SAMPLES - 1
    form = form_of(strategy, view((41,), skipped=almost))
    assert form is not None and form.skip == (41,)
    (action,) = strategy.on_failure(view((41, 42), skipped=almost)).actions
    assert isinstance(action, GiveUp)


def test_a_batch_leaves_out_from_a_step_on() -> None:
    assert order.without([1, 2, 3], 5, {2: 5, 3: 6}) == [1, 3]
    assert order.without([1, 2, 3], 4, {2: 5}) == [1, 2, 3]


# ---- the search


def search(
    spoil: Callable[[int, Tensor], Tensor], samples: list[int], others: list[int]
) -> tuple[list[int], list[int]]:
    """What is found, and the samples that were computed."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    reducer = GradientReducer(model, max_world=1, entering=lambda _: None)
    computed: list[int] = []

    def loss_of(ids: list[int]) -> Tensor:
        computed.extend(ids)
        (sample,) = ids
        return spoil(sample, model(torch.tensor([[1.0, float(sample)]])).square().sum())

    return spoilt_samples(loss_of, reducer, samples, others, lambda: None), computed


def bad(*which: int, value: float = math.nan) -> Callable[[int, Tensor], Tensor]:
    return lambda sample, loss: loss * value if sample in which else loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_it_finds_the_samples_that_are_not_finite_by_themselves(value: float) -> None:
    assert search(bad(3, 5, value=value), [2, 3, 4, 5], [8])[0] == [3, 5]
    assert search(bad(), [2, 3], [8])[0] == []


def test_a_gradient_alone_is_enough() -> None:
    """The root of 0 is 0, its slope is not finite."""
    spoil = lambda sample, loss: (loss * 0).sqrt() if sample == 3 else loss  # noqa: E731
    assert search(spoil, [2, 3], [8])[0] == [3]


def test_a_broken_rank_does_not_accuse_its_samples() -> None:
    everything = bad(2, 3, 8, 9, 10)
    found, computed = search(everything, [2, 3], [8, 9, 10, 11])
    assert (found, computed) == ([], [8, 9, 10])
    assert search(bad(2, 3), [2, 3], [])[0] == [], "nothing to compare with"
    assert search(bad(2, 8), [2, 3], [8, 9])[0] == [2], "one of the others may be bad too"


# ---- the rank


def joined(rank: Rank, generation: int, skip: dict[int, int] | None = None, **more: Any) -> None:
    """``skip``: it has not been told of these yet."""
    if skip:
        rank.tell(LeaveOut(after=0, samples=list(skip), since=list(skip.values())))
        more["left_out"] = len(skip)
    rank.tell(join(generation, store_port=rank.store_port, timeout_s=LIMIT_S, **more))
    rank.hear(Joined)


def poisoned(directory: Path, sample: int) -> Rank:
    """A world of one in which a sample's loss is NaN."""
    rank = Rank(directory, every=100)
    rank.job.spoil = lambda ids, loss: loss * math.nan if sample in ids else loss
    rank.job.loss_of = lambda ids: (
        rank.model(torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in ids])).square().sum()
    )
    return rank


def test_a_rank_names_the_sample_when_asked_to_and_leaves_it_out_when_told_to(
    tmp_path: Path,
) -> None:
    due = order.batch(3, 4, 64, 5)
    rank = poisoned(tmp_path, due[1])
    joined(rank, 1)
    parked = rank.hear(Parked)
    assert (parked.step, parked.why, parked.samples) == (2, "nonfinite", [])
    joined(rank, 2, examine=3)
    parked = rank.hear(Parked)
    assert (parked.step, parked.why, parked.samples) == (2, "nonfinite", [due[1]])
    joined(rank, 3, skip={due[1]: 3}, examine=3)
    assert rank.hear(Finished).step == 6
    rank.stop()
    taken = {e.step: e.data["samples"] for e in rank.events(Kind.BATCH_TAKEN) if e.generation == 3}
    assert taken[3] == [due[0], *due[2:]]
    committed = {e.step: e.data["samples"] for e in rank.events(Kind.STEP_COMMITTED)}
    assert (committed[2], committed[3]) == (4, 3)


def test_a_loop_that_offers_no_way_to_compute_a_sample_names_none(tmp_path: Path) -> None:
    rank = poisoned(tmp_path, order.batch(1, 4, 64, 5)[0])
    rank.job.loss_of = None
    for generation in (1, 2):
        joined(rank, generation, examine=1)
        assert rank.hear(Parked).samples == []
    rank.stop()


def test_a_rank_without_a_share_takes_part_and_counts_for_nothing(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    job = rank.job
    job.rank, job.world = 1, 2
    job.state.skip = ExclusionIndex(dict.fromkeys(order.batch(1, 4, 64, 5)[:3], 1))
    attempt = Step(job, 1, job.micro_batches(1))
    assert (attempt.count, attempt.samples) == (0, order.batch(1, 4, 64, 5)[3:])
    job.state.skip = ExclusionIndex(dict.fromkeys(order.batch(1, 4, 64, 5), 1))
    with pytest.raises(RuntimeError, match="every sample of step 1 is left out"):
        job.micro_batches(1)
    rank.channel.close()


def test_it_is_part_of_the_state_that_is_saved_and_copied(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    joined(rank, 1, skip={7: 3})
    rank.hear(Finished)
    assert rank.job.state.scalars()["skip"] == {"7": 3}
    newest = newest_first(tmp_path / "checkpoints")[0]
    assert verify(newest)["scalars"]["skip"] == {"7": 3}
    rank.job.state.skip = ExclusionIndex()
    rank.job.state.load_scalars(verify(newest)["scalars"])
    assert rank.job.state.skip == {7: 3}
    rank.stop()
