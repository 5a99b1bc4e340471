"""What training loops do with gradients and optimizers: harmless, or an error that says what to do
instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.open_files import open_files
from tests.support.ranks import Self, results
from tests.support.running import until
from trainchaos.recovery.collectives import buckets
from trainchaos.recovery.rank.job import Job, JobConfig
from trainchaos.recovery.rank.standalone import lone_job
from trainchaos.recovery.rank.step import Step
from trainchaos.recovery.state.digest import bytes_of

STEPS, BATCH = 4, 6
Each = Callable[["Loop", Step], Any]


class Loop:
    """A job of one rank with a model of several buckets, whose loss is a sum, as the job divides
    it.
    """

    def __init__(
        self, *, elastic: bool = False, before: Callable[[nn.Module], Any] | None = None
    ) -> None:
        config = JobConfig(
            process="alone",
            world=2,
            determinism="elastic" if elastic else "default",
            steps=STEPS,
            global_batch=BATCH,
            samples=64,
            seed=5,
            checkpoint_dir=None,
            checkpoint_every=0,
            checkpoint_keep=1,
        )
        self.job: Job = lone_job(config)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 1))
        if before is not None:
            before(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.job.attach(self.model, self.optimizer, self.scheduler, clip_norm=1.0)

    def loss(self, samples: list[int]) -> Tensor:
        x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in samples])
        return self.model(x).square().sum()

    def run(self, each: Each) -> dict[str, bytes]:
        """The state after all steps."""
        while self.job.running():
            with self.job.step() as step:
                each(self, step)
                step.commit()
        return {name: bytes(bytes_of(tensor)) for name, tensor in self.job.state.tensors().items()}


def plain(loop: Loop, step: Step) -> None:
    for samples in step.batches():
        step.backward(loop.loss(samples))


def zero_first(loop: Loop, step: Step) -> None:
    for samples in step.batches():
        loop.optimizer.zero_grad()
        step.backward(loop.loss(samples))


def zero_late(loop: Loop, step: Step) -> None:
    for samples in step.batches():
        loss = loop.loss(samples)
        loop.model.zero_grad(set_to_none=True)
        step.backward(loss)


def zero_in_place(loop: Loop, step: Step) -> None:
    for samples in step.batches():
        loop.optimizer.zero_grad(set_to_none=False)
        step.backward(loop.loss(samples))


def replaced_between(loop: Loop, step: Step) -> None:
    plain(loop, step)
    for parameter in loop.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 600)


@pytest.mark.parametrize("each", [zero_first, zero_late, zero_in_place, replaced_between])
@pytest.mark.parametrize("elastic", [False, True], ids=["sums", "elastic"])
def test_letting_go_of_gradients_changes_nothing(each: Each, elastic: bool) -> None:
    """What backward makes then is put where it is reduced."""
    assert Loop(elastic=elastic).run(each) == Loop(elastic=elastic).run(plain)


def test_a_hook_from_before_the_job_may_replace_gradients() -> None:
    def twice(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2

    def hooked(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(twice)

    def scaled(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)

    assert Loop(before=hooked).run(plain) == Loop(before=scaled).run(plain) != Loop().run(plain)


def test_parts_of_a_loss_add_up() -> None:
    def accumulating(loop: Loop, step: Step) -> None:
        for samples in step.batches():
            for sample in samples[:-1]:
                step.accumulate(loop.loss([sample]))
            step.backward(loop.loss(samples[-1:]))

    losses: list[list[float]] = []
    for each in (plain, accumulating):
        loop = Loop()
        loop.run(each)
        losses.append(list(loop.job.state.last))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def frozen_for_a_while(loop: Loop, step: Step) -> None:
    for parameter in loop.model[2].parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(step.number not in (2, 3))
    plain(loop, step)


@pytest.mark.parametrize("elastic", [False, True], ids=["sums", "elastic"])
def test_what_is_frozen_in_the_middle_stays_as_it_is_and_trains_on_later(elastic: bool) -> None:
    loop = Loop(elastic=elastic)
    seen: list[tuple[bytes, bytes]] = []

    def each(loop: Loop, step: Step) -> None:
        frozen_for_a_while(loop, step)
        seen.append((bytes(bytes_of(loop.model[2].weight)), bytes(bytes_of(loop.model[0].weight))))  # type: ignore

    loop.run(each)
    middle, first = zip(*seen, strict=True)
    assert len(set(first)) == STEPS
    # Seen before the commit of each step: 1 changes it, 2 and 3 do not, 4 does.
    assert len({middle[1], middle[2], middle[3]}) == 1 and middle[0] != middle[1]
    assert bytes(bytes_of(loop.model[2].weight)) != middle[3]  # type: ignore[union-attr,arg-type]


def test_what_is_frozen_is_state() -> None:
    """A spare that takes over has not run the line that froze it."""
    one, other = Loop(), Loop()
    for parameter in one.model[2].parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    other.job.state.load_scalars(one.job.state.scalars())
    assert [p.requires_grad for p in other.model.parameters()] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_parameter_without_a_gradient_in_a_step_is_no_obstacle() -> None:
    def each(loop: Loop, step: Step) -> None:
        x = torch.ones(len(step.samples), 40, requires_grad=True)
        for samples in step.batches():
            step.backward(
                loop.loss(samples) if step.number != 2 else loop.model[3](x).square().sum()
            )  # type: ignore

    loop = Loop()
    loop.run(each)
    assert loop.job.state.step == STEPS


def backward_itself(loop: Loop, step: Step) -> None:
    loop.loss(step.samples[:2]).backward()
    step.backward(loop.loss(step.samples[2:]))


def zero_between(loop: Loop, step: Step) -> None:
    plain(loop, step)
    loop.optimizer.zero_grad()


def step_itself(loop: Loop, step: Step) -> None:
    plain(loop, step)
    loop.optimizer.step()


def schedule_itself(loop: Loop, step: Step) -> None:
    plain(loop, step)
    loop.scheduler.step()


def scaling(loop: Loop, step: Step) -> None:
    step.backward(torch.amp.GradScaler("cpu").scale(loop.loss(step.samples)))  # type: ignore[arg-type]


def frozen_between(loop: Loop, step: Step) -> None:
    step.accumulate(loop.loss(step.samples[:2]))
    loop.model[0].requires_grad_(False)
    step.backward(loop.loss(step.samples[2:]))


def reentrant(loop: Loop, step: Step) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(2, 3, requires_grad=True)
    twice = checkpoint(loop.model, x, use_reentrant=True) + checkpoint(
        loop.model, x, use_reentrant=True
    )
    step.backward(twice.sum())


REFUSED: dict[str, tuple[Each, str]] = {
    "backward": (backward_itself, "give the loss to step.backward(loss), and parts of it"),
    "zero_grad": (zero_between, "zero_grad() between step.backward() and step.commit()"),
    "optimizer": (step_itself, "step.commit() makes the optimizer's step"),
    "scheduler": (schedule_itself, "step.commit() makes the scheduler's step"),
    "scaler": (scaling, "use torch.autocast with bfloat16, which needs no scaler"),
    "freezing": (frozen_between, "frozen or unfrozen between two backward passes of one step"),
    "checkpoint": (reentrant, "use torch.utils.checkpoint with use_reentrant=False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_make_ranks_differ_is_an_error_that_says_what_to_do(what: str) -> None:
    each, words = REFUSED[what]
    with pytest.raises(RuntimeError, match=re.escape(words)):
        Loop().run(each)


def late_hooks(change: Callable[[Tensor], None], *, elastic: bool) -> Loop:
    """Hooks on the parameters of the first bucket, registered after the job's."""
    loop = Loop(elastic=elastic)
    for parameter in loop.model[3].parameters():  # type: ignore[union-attr]
        parameter.register_post_accumulate_grad_hook(change)
    return loop


def doubled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def taken(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("elastic", [False, True], ids=["sums", "elastic"])
@pytest.mark.parametrize(
    ("change", "words"),
    [(doubled, "changed while it was reduced"), (taken, "a hook has replaced a gradient")],
)
def test_a_hook_that_changes_what_is_under_way_is_found(
    change: Callable[[Tensor], None], words: str, elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 170)
    with pytest.raises(RuntimeError, match=words):
        late_hooks(change, elastic=elastic).run(plain)


def test_optimizer_and_scaler_are_the_scripts_own_outside_of_the_steps() -> None:
    loop = Loop()
    loop.run(plain)
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    loop.loss([1]).backward()
    loop.optimizer.step()
    after = list(loop.model.parameters())
    assert any(not torch.equal(old, now) for old, now in zip(before, after, strict=True))
    torch.amp.GradScaler("cpu").scale(torch.ones(1))


def several_jobs(_: Self) -> None:
    """Three more jobs than the first, which opens some descriptors for good."""

    def whole() -> None:
        Loop().run(lambda loop, step: step.backward(loop.loss(step.samples)))

    whole()
    before = open_files()
    for _round in range(3):
        whole()
    until(lambda: open_files() <= before)


@pytest.mark.slow
def test_a_job_that_is_over_leaves_nothing_open() -> None:
    # in a process of its own: an earlier test's thread may open something at any time
    results(several_jobs, 1)
