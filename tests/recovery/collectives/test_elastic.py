"""Gradients that are the same to the last bit, however many ranks there are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import Self, results
from trainchaos.recovery.collectives import buckets
from trainchaos.recovery.collectives.elastic import ElasticReducer
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.reduce import Asks, Reduced
from trainchaos.recovery.data import order

PARTS = 4
BATCH = 10  # micro-batches of 3, 3, 2 and 2
SMALL = 200  # bytes: several buckets
Spoil = tuple[int, float, int]
"""Rank, value, which of its micro-batches; see ``one_step``."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1)
    )


def loss_of(model: nn.Module, ids: list[int]) -> Tensor:
    rows = torch.stack([torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in ids])
    return (model(rows[:, :4]) - rows[:, 4:]).square().sum()


def one_step(
    reducer: ElasticReducer,
    model: nn.Module,
    group: Group,
    number: int,
    *,
    pause: bool = False,
    spoil: Spoil | None = None,
) -> Reduced:
    """As a job does it."""
    ids = list(range(number * BATCH, (number + 1) * BATCH))
    micros = order.micro_batches(ids, rank=group.rank, world=group.world, full=PARTS, elastic=True)
    reducer.begin()
    for place, micro in enumerate(micros):
        torch.manual_seed(1000 * number + micro.number)
        loss = loss_of(model, micro.samples)
        value = float(loss.detach())
        if spoil is not None and spoil[::2] == (group.rank, place):
            loss = loss * spoil[1]
        reducer.expect()
        loss.backward()
        if place + 1 < len(micros):
            reducer.keep(rank=group.rank, loss_sum=value, count=micro.count)
    return reducer.finish(
        rank=group.rank, loss_sum=value, count=micro.count, asks=Asks(pause=pause)
    )


def in_worlds(
    me: Self,
    worlds: tuple[int, ...],
    *,
    bucket_bytes: int = SMALL,
    pause: int = -1,
    spoil: Spoil | None = None,
) -> Any:
    """Two steps in each world in turn, by the ranks in it: what came of each, and the wire bytes of
    the last.
    """
    buckets.BUCKET_BYTES = bucket_bytes
    model = net()
    reducer = ElasticReducer(model, max_world=PARTS, entering=lambda _: None)
    found = []
    for generation, world in enumerate(worlds, start=1):
        if me.rank >= world:
            continue
        group = me.group(generation, world=world)
        group.form()
        reducer.new_generation(group)
        for number in range(2):
            reduced = one_step(reducer, model, group, number, pause=me.rank == pause, spoil=spoil)
            gradients = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
            found.append((world, number, reduced, gradients))
        reducer.clip(reduced.grad_norm, 0.01)
        group.leave()
    return found, reducer.wire_bytes


def by_step(got: list[Any]) -> list[dict[int, Any]]:
    return [{number: (reduced, grads) for _, number, reduced, grads in found} for found, _ in got]


@pytest.mark.real
@pytest.mark.parametrize(
    "bucket_bytes", [SMALL, pytest.param(25 * 1024 * 1024, marks=pytest.mark.long)]
)
def test_any_number_of_ranks_gets_the_same_bits(bucket_bytes: int) -> None:
    got = results(partial(in_worlds, worlds=(4, 3, 4, 2, 1), bucket_bytes=bucket_bytes), PARTS)
    worlds = {world for found, _ in got for world, *_ in found}
    assert worlds == {1, 2, 3, 4}
    reference = {number: (reduced, grads) for _, number, reduced, grads in got[0][0][:2]}
    assert reference[0] != reference[1]
    for found, _ in got:
        for world, number, reduced, grads in found:
            assert (reduced, grads) == reference[number], f"step {number} with {world} ranks"
    reduced, grads = reference[0]
    assert (reduced.samples, reduced.blamed, reduced.asks.pause) == (BATCH, (), False)


@pytest.mark.real
def test_the_gradients_are_the_mean_over_the_batch() -> None:
    got = results(partial(in_worlds, worlds=(4,)), PARTS)
    model, total = net(), 0.0
    for micro in order.micro_batches(list(range(BATCH)), rank=0, world=1, full=PARTS, elastic=True):
        torch.manual_seed(micro.number)
        loss = loss_of(model, micro.samples)
        total += float(loss.detach())
        loss.backward()
    reduced, grads = by_step(got)[0][0]
    assert reduced.loss == pytest.approx(total / BATCH, rel=1e-6)
    mine = [p.grad / BATCH for p in model.parameters() if p.grad is not None]
    for ours, alone in zip(grads, mine, strict=True):
        assert torch.allclose(
            torch.frombuffer(bytearray(ours), dtype=torch.float32),
            alone.flatten(),
            rtol=1e-5,
            atol=1e-7,
        )
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in mine]))
    assert reduced.grad_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.real
def test_with_all_ranks_there_it_sends_what_a_ring_does() -> None:
    got = results(partial(in_worlds, worlds=(4,), bucket_bytes=25 * 1024 * 1024), PARTS)
    size = sum(p.numel() for p in net().parameters()) * 4
    for _, wire in got:
        assert wire == pytest.approx(2 * size * 3 / 4, abs=4 * (2 * PARTS + 5) * 2)


@pytest.mark.real
@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.long)]
)
@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_rank_to_blame_is_named_whichever_micro_batch_it_was(value: float, place: int) -> None:
    got = results(partial(in_worlds, worlds=(2,), spoil=(1, value, place)), 2)
    for steps in by_step(got):
        assert steps[0][0].blamed == (1,)
        assert not steps[0][0].finite


@pytest.mark.real
@pytest.mark.parametrize("who", [0, 2])
def test_all_ranks_hear_of_a_wish_to_pause(who: int) -> None:
    got = results(partial(in_worlds, worlds=(3,), pause=who), 3)
    assert [steps[0][0].asks.pause for steps in by_step(got)] == [True] * 3


@pytest.mark.real
def test_a_micro_batch_too_few_or_too_many_is_refused() -> None:
    for said in results(out_of_order, 1):
        assert said == [
            "micro-batch 1 of 4 is not this rank's last",
            "this rank has 4 micro-batches, and all are computed",
        ]


def out_of_order(me: Self) -> list[str]:
    model = net()
    reducer = ElasticReducer(model, max_world=PARTS, entering=lambda _: None)
    group = me.group()
    group.form()
    reducer.new_generation(group)
    said = []
    reducer.begin()
    try:
        reducer.finish(rank=0, loss_sum=1.0, count=1)
    except RuntimeError as error:
        said.append(str(error))
    reducer.begin()
    try:
        for _ in range(PARTS):
            reducer.keep(rank=0, loss_sum=1.0, count=1)
    except RuntimeError as error:
        said.append(str(error))
    return said
