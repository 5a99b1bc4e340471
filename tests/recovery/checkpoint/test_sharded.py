"""A sharded model over real gloo groups: the same training as unsharded, and no trace of a step
that was broken off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.support.ranks import Self, meet, ranks, results
from trainchaos.harness.workloads._transformer import Transformer
from trainchaos.recovery.collectives import buckets, sharding
from trainchaos.recovery.collectives.group import GenerationLost, Group
from trainchaos.recovery.collectives.lasting.job_mesh import JobGroups
from trainchaos.recovery.collectives.reduce import Reduced
from trainchaos.recovery.collectives.sharded import ShardedReducer
from trainchaos.recovery.collectives.transfer import copy_state
from trainchaos.recovery.data import order
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.rank.examine import spoilt_samples
from trainchaos.recovery.rank.recipe import ModelRecipe
from trainchaos.recovery.rank.step import exchange_totals, figures_of
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.state.registered import Schedule
from trainchaos.recovery.state.state import TrainState

BATCH = 7
VOCABULARY = 11  # of which the ranks of a replica hold parts of unequal size
LENGTH = 4
SMALL = 400  # bytes: several buckets
LIMIT = 0.5
UNITS = 3  # two blocks and the rest
COLLECTIVES = (
    2 * UNITS - 1 + UNITS + 1
)  # gathered forward and, but the root, backward; scattered; the last word


def net() -> Transformer:
    torch.manual_seed(0)
    return Transformer(vocabulary=VOCABULARY, layers=2, heads=2, width=6, block=LENGTH, dropout=0.0)


def loss_of(model: nn.Module, step: int, share: range) -> Tensor:
    rows = torch.stack(
        [
            torch.randint(
                0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(99 * step + i)
            )
            for i in share
        ]
    )
    logits = model(rows[:, :-1])
    return (
        functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        / LENGTH
    )


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Part:
    """One rank's part of the training, without a job around it."""

    def __init__(self, me: Self, shards: int) -> None:
        self.me = me
        self.shards = shards
        self.layout = Layout(world=me.world, shards=shards)
        self.shard = self.layout.shard_of(me.rank)
        model = net()
        self.state = TrainState(model, None, None, seed=1)
        self.entered: list[int] = []
        self.waits = 0
        # spoil this rank's part of a gradient, once the replica is done with it
        self.poison = False
        self.lose_at = 0  # number of the collective at which the generation is lost
        self.reducer = ShardedReducer(model, entering=self._entering)
        self.reducer.waiting = self._waiting
        self.reducer.check = me.check
        self.recipe = ModelRecipe(model=model, optimizer=adam, scheduler=decay, units=None)
        self.mesh = Mesh(shard=shards)
        self.groups = JobGroups(
            self.mesh,
            self.shard,
            rank=me.rank,
            world=me.world,
            reducer=self.reducer,
            device="cpu",
        )
        assert self.take_part(me.rank)
        self.generation = 0
        self.group: Group

    def take_part(self, rank: int) -> bool:
        return self.recipe.take_part(
            rank,
            self.layout,
            state=self.state,
            reducer=self.reducer,
            groups=self.groups,
            mesh=self.mesh,
        )

    def join(self) -> None:
        if self.generation:
            self.me.leave()
        self.generation += 1
        self.me.entered()
        self.group = self.me.group(self.generation, shards=self.shards)
        self.group.form()
        meet(self.group)
        self.entered = []
        self.reducer.new_generation(self.group)

    def attempt(self, spoil: Callable[[Tensor], Tensor] | None = None) -> Reduced:
        """Up to the reduced gradients of the next step."""
        step, share = self.state.step + 1, order.share(self.me.rank, self.me.world, BATCH)
        self.reducer.begin()
        loss = loss_of(self.state.model, step, share)
        value = float(loss.detach())
        self.reducer.expect()
        (loss if spoil is None else spoil(loss)).backward()
        if self.poison:
            local(next(iter(self.state.trained.values())).grad).view(-1)[0] = float("nan")  # type: ignore[arg-type]
        return self.reducer.finish(rank=self.me.rank, loss_sum=value, count=len(share))

    def apply(self, reduced: Reduced) -> None:
        self.reducer.clip(reduced.grad_norm, LIMIT)
        self.state.apply(0.0)
        self.state.step += 1
        self.state.last = figures_of(self.state.step, reduced)

    def parameters(self) -> dict[str, Any]:
        return {name: part.numpy().copy() for name, part in self.state.parts().items()}

    def _entering(self, number: int) -> None:
        self.entered.append(number)
        if number == self.lose_at:
            self.lose_at = 0
            raise GenerationLost("as the test wants it")

    def _waiting(self, begins: bool) -> None:
        self.waits += 1 if begins else -1


def plainly(steps: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same training by one process that holds everything: state, losses and norms."""
    model = net()
    optimizer = adam(list(model.parameters()))
    state = TrainState(model, optimizer, decay(optimizer), seed=1)
    losses, norms = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, step, range(BATCH)) / BATCH
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        state.apply(0.0)
        state.step = step
    return state.tensors(), losses, norms


def train(shards: int, steps: int, bucket_bytes: int, me: Self) -> Any:
    buckets.BUCKET_BYTES = bucket_bytes
    part = Part(me, shards)
    part.join()
    seen = []
    for _ in range(steps):
        seen.append(reduced := part.attempt())
        part.apply(reduced)
    circles = [
        list(circle.ranks)
        for circle in (part.group.everyone, part.group.circle("shard"), part.group.holders)
    ]
    return part.parameters(), seen, part.entered, len(part.reducer._buckets), part.waits, circles


def whole(parts: list[dict[str, Any]], name: str) -> Tensor:
    """A tensor put together from the parts of one replica."""
    pieces = [torch.from_numpy(part[name]) for part in parts]
    return pieces[0] if pieces[0].ndim == 0 else torch.cat(pieces)


def without_keys(bias: Tensor) -> Tensor:
    """The bias of queries and values. A softmax does not change when all keys move alike, so the
    gradient of the keys' bias is zero but for rounding, which Adam divides by itself: where it goes
    is the processor's choice.
    """
    queries, _, values = bias.chunk(3)
    return torch.cat((queries, values))


@pytest.mark.real
@pytest.mark.parametrize(
    ("world", "shards", "bucket_bytes"), [(4, 2, SMALL), (4, 2, 1 << 20), (3, 3, SMALL)]
)
@pytest.mark.sample(1)
def test_sharded_training_is_that_of_one_process(
    world: int, shards: int, bucket_bytes: int
) -> None:
    steps = 3
    state, losses, norms = plainly(steps)
    got = results(partial(train, shards, steps, bucket_bytes), world)
    first = got[0]
    for rank, (parts, seen, entered, number, waits, circles) in enumerate(got):
        assert [found.loss for found in seen] == pytest.approx(losses, rel=1e-5)
        assert [found.grad_norm for found in seen] == pytest.approx(norms, rel=1e-4)
        assert seen == first[1], "the same to the last bit, on every rank"
        assert all(found.finite and found.samples == BATCH and not found.blamed for found in seen)
        per_step = COLLECTIVES + number
        assert entered == list(range(1, steps * per_step + 1)), "numbered alike on all ranks"
        assert (waits, number > 1) == (0, bucket_bytes == SMALL)
        mates = list(range(rank - rank % shards, rank - rank % shards + shards))
        assert circles == [list(range(world)), mates, list(range(rank % shards, world, shards))]
        twin = got[rank % shards][0]
        assert all(parts[name].tobytes() == twin[name].tobytes() for name in parts), (
            "holders of one shard agree"
        )
    parts = [found[0] for found in got[:shards]]
    assert {part["model.tokens.weight"].shape[0] for part in parts} == (
        {6, 5} if shards == 2 else {4, 3}
    )
    for name, tensor in state.items():
        part, expected = whole(parts, name), tensor.detach()
        if name.endswith(".step"):
            assert part == steps
            continue
        if name.endswith("qkv.bias"):
            part, expected = without_keys(part), without_keys(expected)
        assert torch.allclose(part, expected, rtol=2e-3, atol=2e-4), name


def train_and_lose(shards: int, loser: int, me: Self) -> Any:
    """Lose each step once, at one collective after another; the others are in the midst of it."""
    part = Part(me, shards)
    part.join()
    steps = COLLECTIVES + len(part.reducer._buckets)
    complete = []
    for number in range(1, steps + 1):
        me.say(
            "here"
            # a rank that is lost takes its connections with it, also from whoever is still a step
            # behind
        )
        me.hear()
        part.lose_at = len(part.entered) + number if me.rank == loser else 0
        try:
            part.attempt()
            raise AssertionError("the step was not lost")
        except GenerationLost:
            if me.rank == loser:
                me.say(part.generation)
            complete.append(part.reducer.broken_off())
            assert all(hasattr(p, "_local_tensor") for p in part.state.model.parameters()), (
                "all parts again"
            )
        part.join()
        part.apply(part.attempt())
    return part.parameters(), complete


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize(
    ("world", "shards", "loser"), [(4, 2, 0), pytest.param(2, 2, 1, marks=pytest.mark.long)]
)
def test_a_step_lost_at_any_collective_is_redone_to_the_last_bit(
    world: int, shards: int, loser: int
) -> None:
    steps = COLLECTIVES + 1
    with ranks(partial(train_and_lose, shards, loser), world) as started:
        for _ in range(steps):
            assert {rank.said() for rank in started} == {"here"}
            for rank in started:
                rank.tell("go on")
            generation = started[loser].said()
            for rank in started:
                rank.tell(("abort", generation))
        got = [rank.result() for rank in started]
    unbroken = results(partial(train, shards, steps, 1 << 20), world)
    for (parts, complete), (wanted, *_) in zip(got, unbroken, strict=True):
        assert len(complete) == steps
        # Whose own gradients are complete does not wait for those of other shards.
        assert complete[:-2] == [False] * (steps - 2), "only the last word may be all that lacks"
        assert {name for name in parts if parts[name].tobytes() != wanted[name].tobytes()} == set()
    assert got[loser][1][-2:] == [False, True], "it had said its last word the last time only"


def finish_elsewhere(shards: int, losers: tuple[int, ...], me: Self) -> Any:
    """The last word of a step does not reach the first of some ranks, the others are lost when they
    have it; all other ranks apply the step.
    """
    part = Part(me, shards)
    part.join()
    part.apply(part.attempt())
    complete = False
    if me.rank == losers[0]:
        original = part.reducer._last_word

        def lost(*arguments: Any) -> list[float]:
            original(*arguments)
            raise GenerationLost("the word did not arrive")

        part.reducer._last_word = lost  # type: ignore
        with pytest.raises(GenerationLost):
            part.attempt()
        part.reducer._last_word = original  # type: ignore[method-assign]
        complete = part.reducer.broken_off()
    elif me.rank in losers:
        part.attempt()
        complete = part.reducer.broken_off()
    else:
        part.apply(part.attempt())
    held = part.state.step
    part.join()
    reduced = exchange_totals(2, part.state.last, part.group, "cpu")
    if complete:
        part.reducer.settle(reduced.samples)
        part.apply(reduced)
    part.apply(part.attempt())
    return part.parameters(), complete, held


@pytest.mark.long
@pytest.mark.real
def test_a_step_that_only_some_ranks_could_apply_is_finished_by_the_others() -> None:
    """Nobody who holds shard 0 has applied it, everybody who holds shard 1 has: no copy
    could help.
    """
    got = results(partial(finish_elsewhere, 2, (0, 2)), 4)
    unbroken = results(partial(train, 2, 3, 1 << 20), 4)
    assert [(complete, held) for _, complete, held in got] == [(True, 1), (False, 2)] * 2
    for (parts, *_), (wanted, *_) in zip(got, unbroken, strict=True):
        assert {name for name in parts if parts[name].tobytes() != wanted[name].tobytes()} == set()


def ask_what_nobody_knows(me: Self) -> str:
    part = Part(me, 2)
    part.join()
    part.apply(part.attempt())
    try:
        exchange_totals(2, part.state.last, part.group, "cpu")
    except GenerationLost as error:
        return str(error)
    return ""


@pytest.mark.real
def test_a_step_that_nobody_has_applied_cannot_be_finished() -> None:
    assert results(ask_what_nobody_knows, 2) == ["nobody knows how step 2 ended"] * 2


def spoilt(how: str, who: int, me: Self) -> Reduced:
    """Something goes wrong on one rank."""
    part = Part(me, 2)
    part.join()
    part.apply(part.attempt())
    mine = me.rank == who
    part.poison = how == "part" and mine
    factor = {"nan": float("nan"), "overflow": 3e38}.get(how, 1.0)
    wrong = mine or how == "overflow"
    return part.attempt(lambda loss: loss * factor if wrong else loss)


@pytest.mark.real
@pytest.mark.parametrize(("how", "who"), [("nan", 2), ("nan", 1), ("part", 3)])
@pytest.mark.sample(1)
def test_the_rank_whose_own_gradients_are_not_finite_is_blamed_by_all(how: str, who: int) -> None:
    for found in results(partial(spoilt, how, who), 4):
        assert found.blamed == (who,)
        assert not found.finite


def examined(bad: tuple[int, ...], me: Self) -> list[int]:
    """Samples 2 and 3 are suspected; rank 2 cannot compute some of all."""
    part = Part(me, 2)
    part.join()
    part.apply(part.attempt())

    def alone(samples: list[int]) -> Tensor:
        loss = loss_of(part.state.model, 2, range(samples[0], samples[0] + 1))
        return loss * float("nan") if me.rank == 2 and samples[0] in bad else loss

    return spoilt_samples(alone, part.reducer, [2, 3], [0, 1, 4], lambda: None, part.reducer.agree)


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize(("bad", "found"), [((3,), [3]), ((), []), ((0, 1, 2, 3, 4), [])])
@pytest.mark.sample(1)
def test_all_ranks_look_for_a_sample_together(bad: tuple[int, ...], found: list[int]) -> None:
    assert results(partial(examined, bad), 4) == [found] * 4


def copied(me: Self) -> Any:
    """Ranks 0 and 3 get the state of those that hold the same part."""
    part = Part(me, 2)
    part.join()
    if me.rank in (1, 2):
        with torch.no_grad():
            for tensor in part.state.parts().values():
                tensor.add_(me.rank)
        part.state.step, part.state.last = 5, [5.0, 1.0, 7.0, 2.0]
    source = {0: 2, 2: 2, 1: 1, 3: 1}[me.rank]
    copy_state(
        part.state,
        part.group.holders,
        source=source,
        receive=me.rank in (0, 3),
        progress=lambda: None,
    )
    return part.parameters(), part.state.digests(), part.state.step, part.state.last


@pytest.mark.real
def test_a_part_is_copied_from_whom_holds_the_same() -> None:
    got = results(copied, 4)
    for receiver, source in ((0, 2), (3, 1)):
        assert got[receiver][1:] == got[source][1:]
        assert all(
            got[receiver][0][name].tobytes() == got[source][0][name].tobytes() for name in got[0][0]
        )
    assert got[0][1] != got[1][1]


def waiting_alone(what: str, me: Self) -> str:
    """The other rank does not come; nothing ends the wait but a look at whether the generation goes
    on.
    """
    lost = False

    def check() -> None:
        if lost:
            raise GenerationLost("looked up")

    me.check = check if me.rank == 0 else me.check  # type: ignore[method-assign]
    part = Part(me, 2)
    part.join()
    if me.rank == 1:
        me.hear()
        return ""
    lost, part.reducer.check = True, None
    whole, output = torch.ones(8), torch.zeros(16 if what == "gather" else 4)
    try:
        getattr(part.reducer, what)(output, whole)
    except GenerationLost as error:
        return str(error)
    return "it ended"


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("what", ["gather", "reduce_scatter"])
def test_a_wait_in_the_midst_of_a_pass_looks_up(what: str) -> None:
    with ranks(partial(waiting_alone, what), 2) as started:
        assert started[0].result() == "looked up"


def asked_for_another(me: Self) -> tuple[bool, str]:
    part = Part(me, 2)
    again = part.take_part(me.rank + 2)
    try:
        part.take_part(1 - me.rank)
    except RuntimeError as error:
        return again, str(error)
    return again, ""


@pytest.mark.real
def test_a_process_keeps_its_part_for_life() -> None:
    told_each = results(asked_for_another, 2)
    assert [again for again, _ in told_each] == [False, False]
    assert [text for _, text in told_each] == [
        f"this process holds shard {shard}, and is to be shard {1 - shard}" for shard in (0, 1)
    ]


# ---- what a script may attach


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "complaint"),
    [
        ("made", None, "attach a function that makes the optimizer"),
        (None, "made", "attach a function that makes its scheduler"),
    ],
)
def test_what_the_job_has_to_make_may_not_be_made(
    optimizer: str | None, scheduler: str | None, complaint: str
) -> None:
    model = net()
    made = adam(list(model.parameters()))
    recipe = ModelRecipe(
        model=model,
        optimizer=made if optimizer else adam,
        scheduler=decay(made) if scheduler else decay,
        units=None,
    )
    with pytest.raises(TypeError, match=complaint):
        recipe.check(shards=2)
    recipe.check(shards=1)


def test_a_model_that_is_sharded_already_is_not_attached() -> None:
    model = net()
    model.__class__ = type("FSDPNet", (_fsdp_module(), Transformer), {})
    with pytest.raises(TypeError, match="before fully_shard"):
        ModelRecipe(model=model, optimizer=adam, scheduler=None, units=None).check(shards=2)


def _fsdp_module() -> type:
    from torch.distributed.fsdp import FSDPModule

    assert fully_shard is not None
    return FSDPModule


def test_both_may_be_made_without_shards_too() -> None:
    recipe = ModelRecipe(model=net(), optimizer=adam, scheduler=decay, units=None)
    recipe.check(shards=1)
    optimizer, scheduler = recipe.make()
    assert Schedule(scheduler, optimizer).scheduler.optimizer is optimizer


def rehearsed(me: Self) -> tuple[bool, bool, bool]:
    """Rehearsing leaves nothing behind, and is refused where a script has a process group of its
    own.
    """
    before = torch.random.get_rng_state()
    sharding.rehearse(3, "cpu")
    same = torch.equal(before, torch.random.get_rng_state())
    left = dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharding.rehearse(3, "cpu")
    except RuntimeError:
        return same, left, dist.is_initialized()
    return same, left, False


@pytest.mark.real
def test_a_rehearsal_leaves_nothing_behind() -> None:
    assert results(rehearsed, 1) == [(True, False, True)]
