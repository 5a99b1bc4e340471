"""A model over a mesh of real gloo groups: the same training as in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.ranks import Self, meet, results
from trainchaos.harness.workloads._parallel import Pipeline, parallelize, part_of
from trainchaos.harness.workloads._transformer import Transformer
from trainchaos.recovery.checkpoint.chunks import chunks_of
from trainchaos.recovery.checkpoint.restore import restore_newest
from trainchaos.recovery.checkpoint.saves import SaveOrder, content_of, write
from trainchaos.recovery.collectives.buckets import Bucket
from trainchaos.recovery.collectives.lasting import groups
from trainchaos.recovery.collectives.lasting.job_mesh import JobGroups
from trainchaos.recovery.collectives.lost import GenerationLost, lost_in
from trainchaos.recovery.collectives.reduce import Reduced
from trainchaos.recovery.collectives.sharded import ShardedReducer
from trainchaos.recovery.data import order
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.rank.recipe import ModelRecipe
from trainchaos.recovery.state.state import TrainState

pytestmark = pytest.mark.real

BATCH, LENGTH, VOCABULARY, WIDTH = 8, 4, 11, 8
LIMIT = 0.5
STEPS = 3
Cut = Callable[[Transformer, Any], nn.Module]


def net() -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        vocabulary=VOCABULARY, layers=3, heads=4, width=WIDTH, block=LENGTH, dropout=0.0
    )


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def rows(step: int, share: Sequence[int]) -> Tensor:
    made = [torch.Generator().manual_seed(99 * step + i) for i in share]
    return torch.stack(
        [torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=each) for each in made]
    )


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / LENGTH


class Part:
    """What a rank of a job holds, without the job."""

    def __init__(
        self, me: Self, mesh: Mesh, schedule: Any = "1f1b", cut: Cut = parallelize
    ) -> None:
        self.me, self.mesh, self.cut = me, mesh, cut
        self.layout = Layout(world=me.world, shards=mesh.cells)
        self.recipe = ModelRecipe(net(), adam, lambda o: ExponentialLR(o, 0.9), None, self._cut_up)
        self.state = TrainState(self.recipe.model, None, None, seed=1)
        self.waits = 0
        self.entered = 0
        self.lose_at = -1  # number of the collective of a generation at which it is lost
        self.reducer = ShardedReducer(self.recipe.model, entering=self._entering)
        self.reducer.waiting = self._waiting
        self.groups = JobGroups(
            mesh,
            self.layout.shard_of(me.rank),
            rank=me.rank,
            world=me.world,
            reducer=self.reducer,
            device="cpu",
        )
        self.recipe.take_part(
            me.rank,
            self.layout,
            state=self.state,
            reducer=self.reducer,
            groups=self.groups,
            mesh=mesh,
        )
        self.pipeline = self.new_pipeline(schedule)
        self.generation = 0

    def new_pipeline(self, schedule: Any) -> Pipeline:
        return Pipeline(
            schedule=schedule,
            microbatches=4,
            between=(LENGTH // self.mesh.context, WIDTH),
            vocabulary=VOCABULARY,
            loss_of=summed,
        )

    def _cut_up(self, model: nn.Module, mesh: Any) -> nn.Module:
        assert isinstance(model, Transformer)
        return self.cut(model, mesh)

    def _entering(self, _: int) -> None:
        self.entered += 1
        if self.entered == self.lose_at:
            self.lose_at = -1
            raise GenerationLost("as the test wants it")

    def _waiting(self, begins: bool) -> None:
        self.waits += 1 if begins else -1

    def join(self) -> None:
        if self.generation:
            self.groups.leave()
            self.me.leave()
        self.generation += 1
        self.entered = 0
        self.me.entered()
        self.group = self.me.group(self.generation, mesh=self.mesh)
        self.group.form()
        meet(self.group)
        self.reducer.new_generation(self.group)
        self.groups.join(self.group)

    def attempt(self) -> Reduced:
        """Up to the reduced gradients of the next step."""
        me, mesh = self.me, self.mesh
        step = self.state.step + 1
        share = order.share(mesh.shares(me.rank), mesh.shares(me.world), BATCH)
        tokens, mine = rows(step, share), part_of(self.groups.mesh, LENGTH)
        inputs, targets = tokens[:, :-1][:, mine], tokens[:, 1:][:, mine]
        self.reducer.begin()
        if mesh.pipeline > 1:
            loss = self._passes(inputs, targets)
        else:
            loss = summed(self.state.model(inputs), targets)
            self.reducer.expect()
            loss.backward()
        value = float(loss.detach())
        return self.reducer.finish(rank=me.rank, loss_sum=value, count=len(share))

    def _passes(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As ``Step.run``."""
        model, mesh = self.state.model, self.groups.mesh
        assert isinstance(model, Transformer)
        self.reducer.expect_several()
        try:
            return self.pipeline.run(model, mesh, inputs, targets, lambda loss: loss)
        except RuntimeError as error:
            raise lost_in(error) or error from None

    def apply(self, reduced: Reduced) -> None:
        self.reducer.clip(reduced.grad_norm, LIMIT)
        self.state.apply(0.0)
        self.state.step += 1

    def held(self) -> list[Any]:
        """Of each tensor: name, shape of the whole, place of this rank's box, and the box."""
        return [
            (c.name, c.shape, c.at, c.size, c.data.numpy().copy())
            for c in chunks_of(self.state.tensors())
        ]


def plainly() -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same training by one process that holds everything: state, losses and norms."""
    model = net()
    optimizer = adam(list(model.parameters()))
    state = TrainState(model, optimizer, ExponentialLR(optimizer, 0.9), seed=1)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        tokens = rows(step, range(BATCH))
        loss = summed(model(tokens[:, :-1]), tokens[:, 1:]) / BATCH
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        state.apply(0.0)
        state.step = step
    return state.tensors(), losses, norms


def train(mesh: Mesh, schedule: str, me: Self, cut: Cut = parallelize) -> Any:
    part = Part(me, mesh, schedule, cut)
    part.join()
    seen = []
    for _ in range(STEPS):
        seen.append(reduced := part.attempt())
        part.apply(reduced)
    return part.held(), [(r.loss, r.grad_norm, r.samples) for r in seen], part.waits


def whole(found: list[Any], cells: int) -> dict[str, Tensor]:
    """The tensors of one replica, put together."""
    made: dict[str, Tensor] = {}
    for held in found[:cells]:
        for name, shape, at, size, data in held[0]:
            target = made.setdefault(name, torch.full(shape, float("nan")))
            for dim, (start, length) in enumerate(zip(at, size, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(torch.from_numpy(data))
    return made


@pytest.mark.parametrize(
    ("world", "mesh", "schedule"),
    [
        (2, Mesh(tensor=2), "-"),
        (2, Mesh(pipeline=2), "1f1b"),
        (4, Mesh(context=2), "-"),
        pytest.param(4, Mesh(context=4), "-", marks=pytest.mark.long),
        pytest.param(4, Mesh(context=2, tensor=2), "-", marks=pytest.mark.long),
        pytest.param(4, Mesh(pipeline=2, context=2), "1f1b", marks=pytest.mark.long),
        pytest.param(4, Mesh(shard=2, context=2), "-", marks=pytest.mark.long),
        pytest.param(4, Mesh(tensor=2), "-", marks=pytest.mark.long),
        pytest.param(3, Mesh(pipeline=3), "gpipe", marks=pytest.mark.long),
        pytest.param(4, Mesh(shard=2, tensor=2), "-", marks=pytest.mark.long),
        pytest.param(8, Mesh(tensor=2, pipeline=2), "1f1b", marks=pytest.mark.long),
        (4, Mesh(shard=2, pipeline=2), "1f1b"),
        pytest.param(4, Mesh(shard=2, pipeline=2), "gpipe", marks=pytest.mark.long),
        pytest.param(6, Mesh(shard=2, pipeline=3), "1f1b", marks=pytest.mark.long),
        pytest.param(6, Mesh(shard=3, pipeline=2), "1f1b", marks=pytest.mark.long),  # 3, 3, 2
        pytest.param(8, Mesh(shard=2, pipeline=2), "1f1b", marks=pytest.mark.long),
        pytest.param(8, Mesh(shard=2, pipeline=2, tensor=2), "1f1b", marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.sample(2)
def test_a_mesh_trains_what_one_process_does(world: int, mesh: Mesh, schedule: str) -> None:
    found = results(partial(train, mesh, schedule), world)
    state, losses, norms = plainly()
    for _, seen, waits in found:
        assert waits == 0
        assert [loss for loss, _, _ in seen] == pytest.approx(losses, rel=1e-5)
        assert [norm for _, norm, _ in seen] == pytest.approx(norms, rel=1e-5)
        assert [count for _, _, count in seen] == [BATCH] * STEPS
    for rank, (held, _, _) in enumerate(found):
        first = mesh.line(rank % mesh.cells, "context")[0]
        for mine, other in zip(held, found[first][0], strict=True):
            assert mine[:4] == other[:4] and (mine[4] == other[4]).all(), mine[0]
    made = whole(found, mesh.cells)
    assert set(made) == set(state)
    for name, tensor in state.items():
        keys = name.endswith("qkv.bias")  # of keys: a softmax takes no notice, but for rounding
        tolerance = 2e-2 if keys else 1e-4
        torch.testing.assert_close(
            made[name], tensor.to(made[name]), rtol=tolerance, atol=1e-4 if not keys else 3e-2
        )


def train_over_the_host(mesh: Mesh, schedule: str, me: Self) -> Any:
    """As on GPUs with gloo, which sends no memory of theirs from rank to rank."""
    groups._on_host = lambda circle, tensor: True
    return train(mesh, schedule, me)


def test_what_stages_send_each_other_may_go_over_the_host() -> None:
    over, direct = (
        results(partial(how, Mesh(pipeline=2), "1f1b"), 2) for how in (train_over_the_host, train)
    )
    for (held, seen, _), (other, wanted, _) in zip(over, direct, strict=True):
        assert seen == wanted
        for mine, its in zip(held, other, strict=True):
            assert mine[:4] == its[:4] and (mine[4] == its[4]).all(), mine[0]


def exchange_in_another_order(me: Self) -> Any:
    part = Part(me, Mesh(context=2))
    part.join()
    total, whole = torch.ones(3), torch.zeros(2)
    group: Any = part.groups.mesh.get_group("context")
    work = part.group.same.start_all_reduce(total) if me.rank else None
    group.all_gather_single(whole, torch.full((1,), float(me.rank)))
    part.group.same.wait(work or part.group.same.start_all_reduce(total))
    return total.tolist(), whole.tolist()


def test_a_bucket_may_be_sent_before_or_after_keys_and_values() -> None:
    """By ranks whose backward passes come to them in another order."""
    assert results(exchange_in_another_order, 2) == [([2.0] * 3, [0.0, 1.0])] * 2


def spoil(mesh: Mesh, who: int, me: Self) -> Any:
    part = Part(me, mesh, "gpipe")
    part.join()
    if me.rank == who:
        last = next(m for m in reversed([*part.state.model.modules()]) if isinstance(m, nn.Linear))
        last.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    return part.attempt().blamed


@pytest.mark.parametrize(
    ("world", "mesh", "who"),
    [
        (4, Mesh(tensor=2), 3),
        pytest.param(2, Mesh(pipeline=2), 0, marks=pytest.mark.long),
        pytest.param(2, Mesh(pipeline=2), 1, marks=pytest.mark.long),
        pytest.param(4, Mesh(shard=2, tensor=2), 2, marks=pytest.mark.long),
        pytest.param(4, Mesh(pipeline=2, tensor=2), 1, marks=pytest.mark.long),
        pytest.param(4, Mesh(shard=2, pipeline=2), 0, marks=pytest.mark.long),
        pytest.param(4, Mesh(shard=2, pipeline=2), 3, marks=pytest.mark.long),
        pytest.param(4, Mesh(context=2), 2, marks=pytest.mark.long),
        pytest.param(4, Mesh(context=2), 3, marks=pytest.mark.long),
        pytest.param(4, Mesh(context=2, tensor=2), 1, marks=pytest.mark.long),
        pytest.param(4, Mesh(pipeline=2, context=2), 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_who_sends_what_is_not_finite_first_is_blamed_alone(
    world: int, mesh: Mesh, who: int
) -> None:
    assert results(partial(spoil, mesh, who), world) == [(who,)] * world


def give_nothing(mesh: Mesh, me: Self) -> str:
    """What is said to a rank whose part has no parameters."""
    recipe = ModelRecipe(net(), adam, None, None, lambda model, mesh: nn.Identity())
    state = TrainState(recipe.model, None, None, seed=1)
    part = Part(me, mesh)
    with pytest.raises(RuntimeError) as told:
        recipe.take_part(
            me.rank,
            part.layout,
            state=state,
            reducer=part.reducer,
            groups=part.groups,
            mesh=mesh,
        )
    return str(told.value)


def test_a_part_without_parameters_is_refused_by_its_cell() -> None:
    said = results(partial(give_nothing, Mesh(pipeline=2)), 2)
    assert all(f"cell {cell}, has no parameters" in text for cell, text in enumerate(said))


def save_and_restore(mesh: Mesh, folder: Path, me: Self) -> Any:
    """What this rank holds after steps, and what one of another arrangement restores of it."""
    part = Part(me, mesh)
    part.join()
    for _ in range(STEPS):
        part.apply(part.attempt())
    order = SaveOrder(directory=folder, generation=1, writer=me.rank, writers=mesh.cells)
    write(order, content_of(part.state, me.rank, mesh.cells))
    return part.held()


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(pipeline=2),
        Mesh(tensor=2),
        Mesh(shard=2, pipeline=2),
        Mesh(context=2),
        pytest.param(Mesh(shard=2, context=2), marks=pytest.mark.long),
        pytest.param(Mesh(pipeline=2, context=2), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.sample(1)
def test_a_checkpoint_of_a_mesh_loads_into_one_process(mesh: Mesh, tmp_path: Path) -> None:
    found = results(partial(save_and_restore, mesh, tmp_path), mesh.cells)
    model = net()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    optimizer = adam(list(model.parameters()))
    state = TrainState(model, optimizer, ExponentialLR(optimizer, 0.9), seed=1)
    assert restore_newest(state, tmp_path, refused=lambda *what: pytest.fail(str(what)))
    assert state.step == STEPS
    made = whole([[held] for held in found], mesh.cells)
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, made[name].to(tensor)), name


def lose_and_redo(mesh: Mesh, numbers: range, me: Self) -> Any:
    """Gradients of a step in one go, and after it was broken off at each of some collectives."""
    part = Part(me, mesh)
    part.join()
    found = [part.attempt().grad_norm]
    for number in numbers:
        part.join()
        part.lose_at = number
        with pytest.raises(GenerationLost):
            part.attempt()
        part.lose_at = -1  # others of a pipeline may be lost before they come to it
        part.reducer.broken_off()
        part.join()
        found.append(part.attempt().grad_norm)
    return found


@pytest.mark.parametrize(
    ("mesh", "numbers"),
    [
        (Mesh(shard=2, tensor=2), range(9, 22, 4)),
        (Mesh(shard=2, pipeline=2), range(3, 13, 3)),
        pytest.param(Mesh(tensor=2), range(2, 12, 3), marks=pytest.mark.long),
        pytest.param(Mesh(context=2), range(1, 9), marks=pytest.mark.long),
        pytest.param(Mesh(pipeline=2, context=2), range(1, 11, 3), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.sample(1)
def test_a_step_that_was_broken_off_leaves_nothing_behind(mesh: Mesh, numbers: range) -> None:
    for norms in results(partial(lose_and_redo, mesh, numbers), mesh.cells):
        assert set(norms) == {norms[0]}


def lose_before_any_pass(me: Self) -> float:
    part = Part(me, Mesh(shard=2))
    part.join()
    part.reducer.begin()
    part.reducer.broken_off()
    part.join()
    return part.attempt().grad_norm


def test_a_first_step_may_be_broken_off_before_its_passes() -> None:
    _, _, norms = plainly()
    assert results(lose_before_any_pass, 2) == pytest.approx([norms[0]] * 2, rel=1e-5)


def replace_one(mesh: Mesh, who: int, me: Self) -> Any:
    """Gradients of a step on all ranks, and again after one of them was started anew."""
    part = Part(me, mesh)
    part.join()
    found = [part.attempt().grad_norm]
    if me.rank == who:
        part.pipeline = part.new_pipeline("1f1b")
    part.join()
    return [*found, part.attempt().grad_norm]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.sample(1)
def test_stages_meet_one_that_was_started_anew(who: int) -> None:
    """After a step that the others had made all passes of."""
    for norms in results(partial(replace_one, Mesh(pipeline=2), who), 2):
        assert set(norms) == {norms[0]}


def take_summand(me: Self) -> Any:
    """What a bucket makes of a gradient of which each rank has a summand."""
    part = Part(me, Mesh(tensor=2))
    part.join()
    along = part.groups.mesh["tensor"]
    weight = nn.Parameter(DTensor.from_local(torch.zeros(2), along, [Replicate()], run_check=False))
    bucket = Bucket([weight], tail=0)
    # as after optimizer.zero_grad(): autograd makes another tensor than the bucket's
    weight.grad = DTensor.from_local(torch.full((2,), me.rank + 1.0), along, [Partial()])
    bucket.take(0)
    return bucket.gradients.tolist()


def test_a_gradient_of_which_ranks_hold_summands_is_added_up() -> None:
    assert results(take_summand, 2) == [[3.0, 3.0]] * 2
