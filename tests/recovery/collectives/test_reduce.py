"""Averaging gradients over ranks: equal to one process, and all ranks know alike who spoilt it."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import Self, results
from trainchaos.recovery.collectives import buckets
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.collectives.reduce import Asks, GradientReducer, Reduced
from trainchaos.recovery.data import order
from trainchaos.recovery.policy.layout import Layout

BATCH = 7
SMALL = 200  # bytes: several buckets


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def samples(ids: list[int] | range) -> tuple[Tensor, Tensor]:
    rows = torch.stack([torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in ids])
    return rows[:, :4], rows[:, 4:]


def loss_of(model: nn.Module, ids: list[int] | range) -> Tensor:
    x, y = samples(ids)
    return (model(x) - y).square().sum()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def reduced(
    me: Self, *, steps: int = 1, bucket_bytes: int = SMALL, spoil: Any = None, pause: int = -1
) -> Any:
    """Train nothing: reduce the gradients of a batch split over the ranks, so many times."""
    buckets.BUCKET_BYTES = bucket_bytes
    model = net()
    entered: list[int] = []
    reducer = GradientReducer(model, max_world=8, entering=entered.append)
    group = me.group()
    group.form()
    reducer.new_generation(group)
    seen = []
    for _ in range(steps):
        reducer.begin()
        share = order.share(me.rank, me.world, BATCH)
        loss = loss_of(model, share)
        value = float(loss.detach())
        if spoil:
            value = spoil(me.rank, model, value)
        reducer.expect()
        loss.backward()
        found = reducer.finish(
            rank=me.rank, loss_sum=value, count=len(share), asks=Asks(pause=me.rank == pause)
        )
        seen.append((found, [gradient.numpy() for gradient in gradients(model)]))
    return seen, entered, len(reducer._buckets), reducer.wire_bytes


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.parametrize(
    ("world", "bucket_bytes"), [(1, SMALL), (2, SMALL), (3, SMALL), (3, 25 * 1024 * 1024)]
)
def test_uneven_shares_give_the_mean_gradient_of_one_process(world: int, bucket_bytes: int) -> None:
    model = net()
    loss = loss_of(model, range(BATCH)) / BATCH
    loss.backward()
    alone = gradients(model)
    norm = float(
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in alone]))
    )
    got = results(partial(reduced, steps=2, bucket_bytes=bucket_bytes), world)
    first: list[tuple[Reduced, list[Any]]] = got[0][0]
    for seen, entered, number, wire in got:
        assert number == (1 if bucket_bytes > SMALL else 3)
        assert entered == list(range(1, 2 * number + 1)), (
            "collectives are numbered through a generation"
        )
        assert (wire > 0) == (world > 1)
        for (found, grads), (_, firsts) in zip(seen, first, strict=True):
            assert (found.samples, found.blamed, found.finite, found.asks.pause) == (
                BATCH,
                (),
                True,
                False,
            )
            assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
            assert found.grad_norm == pytest.approx(norm, rel=1e-5)
            for mine, theirs, single in zip(grads, firsts, alone, strict=True):
                assert mine.tobytes() == theirs.tobytes(), "the same bits on every rank"
                assert torch.allclose(torch.from_numpy(mine), single, rtol=1e-5, atol=1e-7)


def spoil_gradient(
    where: int, what: float, ranks: tuple[int, ...], rank: int, model: nn.Module, value: float
) -> float:
    """Have the gradient of one parameter go wrong on some ranks."""
    if rank in ranks:
        parameter = list(model.parameters())[where]

        def spoilt(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[0] = what
            return gradient

        parameter.register_hook(spoilt)
    return value


def spoil_loss(
    what: float, ranks: tuple[int, ...], rank: int, model: nn.Module, value: float
) -> float:
    return what if rank in ranks else value


@pytest.mark.real
@pytest.mark.parametrize(
    "where",
    [
        pytest.param(0, id="last bucket"),
        pytest.param(2, id="a middle bucket", marks=pytest.mark.long),
        pytest.param(5, id="first bucket", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("what", "ranks"), [(float("nan"), (1,)), (float("-inf"), (0, 2))])
def test_all_ranks_blame_the_one_with_the_bad_gradient(
    where: int, what: float, ranks: tuple[int, ...]
) -> None:
    got = results(partial(reduced, spoil=partial(spoil_gradient, where, what, ranks)), 3)
    for seen, *_ in got:
        assert seen[0][0].blamed == ranks
        assert not seen[0][0].finite


@pytest.mark.real
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_all_ranks_blame_the_one_with_the_bad_loss(what: float) -> None:
    got = results(partial(reduced, spoil=partial(spoil_loss, what, (2,))), 3)
    assert [seen[0][0].blamed for seen, *_ in got] == [(2,)] * 3


@pytest.mark.real
@pytest.mark.parametrize("who", [0, 2])
def test_all_ranks_hear_of_a_wish_to_pause(who: int) -> None:
    got = results(partial(reduced, pause=who), 3)
    assert [seen[0][0].asks.pause for seen, *_ in got] == [True] * 3


def finite_but_overflowing(me: Self) -> Reduced:
    """Each rank's gradient is finite, their sum is not."""
    parameter = nn.Parameter(torch.zeros(2))
    model = nn.Module()
    model.register_parameter("p", parameter)
    reducer = GradientReducer(model, max_world=4, entering=lambda _: None)
    group = me.group()
    group.form()
    reducer.new_generation(group)
    reducer.begin()
    reducer.expect()
    (parameter.sum() * 3e38).backward()
    return reducer.finish(rank=me.rank, loss_sum=0.0, count=1)


@pytest.mark.real
def test_an_overflow_that_nobody_is_to_blame_for_is_not_finite_either() -> None:
    for found in results(finite_but_overflowing, 2):
        assert not found.finite
        assert found.blamed == ()


# ---- without other processes


class OneGroup:
    """A world of one that adds nothing."""

    world = 1
    ranks = range(1)
    abandoned = False

    def start_all_reduce(self, tensor: Tensor) -> object:
        return object()

    def wait(self, work: object) -> None:
        """Nothing to wait for."""

    def read(self, values: Tensor) -> list[float]:
        """They are there."""
        return [float(value) for value in values]


def alone(model: nn.Module) -> GradientReducer:
    reducer = GradientReducer(model, max_world=4, entering=lambda _: None)
    group: Any = OneGroup()
    reducer.new_generation(group)
    return reducer


class Pair(OneGroup):
    """Of two ranks, the other of which sends what it is told to."""

    world = 2
    ranks = range(2)
    layout = Layout(world=2, shards=1)

    def __init__(self, other: float) -> None:
        self.other = other

    def start_all_reduce(self, tensor: Tensor) -> object:
        tensor.data[-3] += self.other  # the flag of rank 1 of 4
        return super().start_all_reduce(tensor)


@pytest.mark.parametrize("blamed", [(), (1,)])
def test_ranks_that_began_with_different_states_apply_no_step(blamed: tuple[int, ...]) -> None:
    """What each holds goes with the flags of a generation's first step, exactly, and of no
    other.
    """
    model, mine, other = net(), "0123456789abcdef", "0123456789abcdee"
    shown = GradientReducer(net(), max_world=4, entering=lambda _: None)
    shown.starts_with(mine)
    flag = float(bool(blamed)) + shown._started
    reducer = GradientReducer(model, max_world=4, entering=lambda _: None)
    for starts, sent, fits in (
        (mine, flag, True),
        ("", float(bool(blamed)), True),
        (other, flag, False),
    ):
        group: Any = Pair(sent)
        reducer.new_generation(group)
        reducer.starts_with(starts)
        reducer.begin()
        reducer.expect()
        loss_of(model, range(BATCH)).backward()
        if fits:
            assert reducer.finish(rank=0, loss_sum=1.0, count=1).blamed == blamed
            reducer.begin()
            group.other = float(bool(blamed))
            reducer.expect()
            assert reducer.finish(rank=0, loss_sum=1.0, count=1).blamed == blamed
        else:
            with pytest.raises(GenerationLost, match="began with different states"):
                reducer.finish(rank=0, loss_sum=1.0, count=1)


def test_parameters_without_a_gradient_do_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    model = net()
    reducer = alone(model)
    reducer.begin()
    reducer.expect()
    model[0](torch.ones(1, 4)).sum().backward()  # type: ignore[index]
    found = reducer.finish(rank=0, loss_sum=1.0, count=1)
    assert found.finite
    assert not model[4].weight.grad.any()  # type: ignore[index,union-attr]
    assert model[0].weight.grad.any()  # type: ignore[index,union-attr]


def test_clipping_is_that_of_torch() -> None:
    ours, theirs = net(), net()
    reducer = alone(ours)
    reducer.begin()
    reducer.expect()
    loss_of(ours, range(BATCH)).backward()
    found = reducer.finish(rank=0, loss_sum=1.0, count=1)
    reducer.clip(found.grad_norm, 0.5)
    loss_of(theirs, range(BATCH)).backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5)
    before = gradients(ours)
    reducer.clip(0.1, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(ours), strict=True)), (
        "small ones stay"
    )


def test_gradients_do_not_add_up_over_attempts() -> None:
    model = net()
    reducer = alone(model)
    for _ in range(3):
        reducer.begin()
        reducer.expect()
        loss_of(model, range(BATCH)).backward()
    reducer.finish(rank=0, loss_sum=1.0, count=1)
    fresh = net()
    loss_of(fresh, range(BATCH)).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(fresh), strict=True))


def test_a_seam_in_the_middle_of_backward_is_reached_once() -> None:
    model = net()
    reducer = alone(model)
    reached: list[int] = []
    reducer.reached = lambda: reached.append(1)
    for attempt in (1, 2):
        reducer.begin()
        reducer.expect()
        loss_of(model, [1, 2]).backward()
        reducer.finish(rank=0, loss_sum=1.0, count=2)
        assert len(reached) == attempt


def test_pacing_hears_of_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    reducer = alone(net())
    group: Any = reducer._group
    group.ranks = range(4)
    paced: list[int] = []
    reducer.pace = paced.append
    reducer.begin()
    reducer.finish(rank=0, loss_sum=1.0, count=1)
    assert sum(paced) == reducer.wire_bytes
    total = 4 * (sum(p.numel() for p in net().parameters()) + 5 + 4)
    assert reducer.wire_bytes == pytest.approx(total * 2 * 3 / 4, abs=len(paced))


def test_reducing_outside_any_generation_is_an_error_not_a_hang() -> None:
    reducer = GradientReducer(net(), max_world=4, entering=lambda _: None)
    reducer.begin()
    with pytest.raises(RuntimeError, match="before any generation was joined"):
        reducer.finish(rank=0, loss_sum=1.0, count=1)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1).bfloat16()), "1.weight is torch.bfloat16"),
        (nn.Linear(2, 1).half(), "weight is torch.float16"),
        (nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1).double()), "1.weight is torch.float64"),
        (
            nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1, device="meta")),
            "1.weight is on meta, others are on cpu",
        ),
        (nn.Linear(2, 1).requires_grad_(False), "nothing to train"),
    ],
)
def test_gradients_that_do_not_go_into_one_sum_are_refused_by_name(
    model: nn.Module, complaint: str
) -> None:
    with pytest.raises(TypeError, match=complaint):
        GradientReducer(model, max_world=2, entering=lambda _: None)


def test_double_precision_is_kept() -> None:
    model = nn.Linear(2, 1).double()
    GradientReducer(model, max_world=2, entering=lambda _: None)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} <= {torch.float64}


class CopyingGroup:
    """A group of this rank alone that puts the sum back by a copy of torch's, as gloo does for
    tensors of a GPU.
    """

    world, ranks, layout = 1, (0,), Layout(world=1)
    abandoned = False

    def start_all_reduce(self, tensor: Tensor) -> Any:
        tensor.copy_(tensor.clone())
        return object()

    def wait(self, work: Any) -> None:
        pass

    def read(self, values: Tensor) -> list[Any]:
        return cast("list[Any]", values.tolist())


@pytest.mark.parametrize("changed", [False, True])
def test_a_sum_that_is_copied_back_is_no_change_of_a_gradient(
    monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    model = net()
    reducer = GradientReducer(model, max_world=1, entering=lambda number: None)
    reducer.new_generation(cast("Any", CopyingGroup()))
    reducer.begin()
    loss = loss_of(model, range(BATCH))
    reducer.expect()
    loss.backward()
    alone = net()
    loss_of(alone, range(BATCH)).backward()
    if changed:
        late = next(p.grad for p in reversed(list(model.parameters())) if p.grad is not None)
        late.mul_(2.0)
        with pytest.raises(RuntimeError, match="changed while it was reduced"):
            reducer.finish(rank=0, loss_sum=loss.detach(), count=BATCH)
        return
    done = reducer.finish(rank=0, loss_sum=loss.detach(), count=BATCH)
    assert done.samples == BATCH and done.finite
    for mine, right in zip(gradients(model), gradients(alone), strict=True):
        assert torch.allclose(mine * BATCH, right)
