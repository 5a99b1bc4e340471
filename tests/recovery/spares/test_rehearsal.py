"""A step that counts for nothing before a process is ready: the job trains as if it had not been
made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.rank.job import Job, JobConfig
from trainchaos.recovery.rank.standalone import lone_job
from trainchaos.recovery.rank.step import Step
from trainchaos.recovery.state.digest import bytes_of

STEPS = 3
Script = Callable[["Loop", Step], Any]


class Loop:
    """A loop with statistics in its model, random numbers and something registered."""

    def __init__(self, *, rehearse: bool, determinism: Any = "default") -> None:
        config = JobConfig(
            process="alone",
            world=2,
            determinism=determinism,
            steps=STEPS,
            global_batch=6,
            samples=64,
            seed=5,
            checkpoint_dir=None,
            checkpoint_every=0,
            checkpoint_keep=1,
            rehearse=rehearse,
        )
        self.job: Job = lone_job(config)
        self.events: list[tuple[Kind, dict[str, Any]]] = []
        write = self.job.write

        def written(kind: Kind, /, **data: Any) -> None:
            self.events.append((kind, data))
            write(kind, **data)

        self.job.write = written  # type: ignore[method-assign]
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.job.attach(self.model, optimizer, scheduler, clip_norm=1.0)
        average = AveragedModel(self.model)
        self.job.register("average", average, update=lambda: average.update_parameters(self.model))
        self.places: list[tuple[int, int, int]] = []

    def run(self, script: Script) -> dict[str, bytes]:
        """The state after all steps."""
        while self.job.running():
            with self.job.step() as step:
                self.places.append((self.job.rank, self.job.world, step.number))
                script(self, step)
                step.commit()
        return {name: bytes(bytes_of(tensor)) for name, tensor in self.job.state.tensors().items()}

    def rehearsed(self) -> list[str]:
        """The errors of the steps that counted for nothing."""
        return [data["error"] for kind, data in self.events if kind is Kind.SPARE_REHEARSED]


def plain(loop: Loop, step: Step) -> None:
    for samples in step.batches():
        x = torch.tensor(samples, dtype=torch.float32).unsqueeze(1) / 64
        step.backward(loop.model(x).square().sum())


def in_parts(loop: Loop, step: Step) -> None:
    x = torch.tensor(step.samples, dtype=torch.float32).unsqueeze(1) / 64
    loss = loop.model(x).square().sum()
    step.accumulate(loss / 2)
    step.backward(loop.model(x).square().sum() / 2)


def decays(loop: Loop, step: Step) -> None:
    plain(loop, step)
    loop.job.state.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("script", [plain, in_parts, decays])
def test_the_job_trains_as_if_it_had_not_been_made(script: Script) -> None:
    loop, other = Loop(rehearse=True), Loop(rehearse=False)
    assert loop.run(script) == other.run(script)
    assert (loop.rehearsed(), other.rehearsed()) == ([""], [])
    assert loop.places == [(1, 2, 1), *other.places]  # as the last rank would
    taken = [data["step"] for kind, data in loop.events if kind is Kind.BATCH_TAKEN]
    assert taken == [1, 2, 3]  # and no sample is accounted for twice


def test_nothing_is_left_of_it() -> None:
    loop = Loop(rehearse=True)
    kept = loop.job.state.scalars()
    assert loop.job.running()
    with loop.job.step() as step:
        plain(loop, step)
        step.commit()
        raise AssertionError("the block is over")
    assert not loop.job.rehearsal.begins()
    assert (loop.job.rank, loop.job.world, loop.job.done) == (-1, 0, 0)
    assert loop.job.state.scalars() == kept
    gradients = [parameter.grad for parameter in loop.model.parameters()]
    assert not any(gradient is not None and gradient.any() for gradient in gradients)


def test_micro_batches_are_rehearsed_too() -> None:
    loop, other = (Loop(rehearse=yes, determinism="elastic") for yes in (True, False))
    assert loop.run(plain) == other.run(plain)
    assert loop.rehearsed() == [""]


@pytest.mark.slow
def test_an_error_of_the_script_is_in_the_log_and_shows_in_the_real_step() -> None:
    def needs_others(loop: Loop, step: Step) -> None:
        plain(loop, step)
        if loop.job.generation == 0:
            torch.distributed.all_reduce(torch.zeros(1))

    def broken(loop: Loop, step: Step) -> None:
        raise KeyError("no such file")

    loop = Loop(rehearse=True)
    assert loop.run(needs_others) == Loop(rehearse=False).run(plain)
    assert loop.rehearsed()[0].startswith("GenerationLost: ")
    loop = Loop(rehearse=True)
    with pytest.raises(KeyError):
        loop.run(broken)
    assert loop.rehearsed() == ["KeyError: 'no such file'"] and len(loop.places) == 2


def test_what_a_script_changes_in_the_state_itself_is_put_back() -> None:
    def changes(loop: Loop, step: Step) -> None:
        plain(loop, step)
        if loop.job.generation == 0:
            with torch.no_grad():
                loop.model[0].weight += 1

    loop, undisturbed = Loop(rehearse=True), Loop(rehearse=False)
    loop.run(changes)
    undisturbed.run(plain)
    assert loop.rehearsed() == [""]
    assert loop.job.state.digests() == undisturbed.job.state.digests()


def test_what_cannot_be_put_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainchaos.recovery.state.state.LEARNED_BYTES", 0)

    def changes(loop: Loop, step: Step) -> None:
        plain(loop, step)
        if loop.job.generation == 0:
            loop.model[0].weight.data += 1

    loop = Loop(rehearse=True)
    loop.run(changes)
    assert loop.rehearsed() == ["ValueError: the script has changed the state before step.commit()"]
    assert not loop.job.member.holding.fresh


class Late:
    """Has a tensor from its first use on."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.held

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.held = state


def test_what_a_script_makes_in_it_is_gone() -> None:
    loop, late, seen = Loop(rehearse=True), Late(), []
    loop.job.register("late", late)

    def makes(loop: Loop, step: Step) -> None:
        plain(loop, step)
        seen.append([*late.held])
        late.held.setdefault("seen", torch.zeros(1))

    loop.run(makes)
    assert loop.rehearsed() == [""]
    assert seen[:3] == [[], [], ["seen"]]


def test_what_a_script_does_around_its_step_is_done_in_its_place_too() -> None:
    loop = Loop(rehearse=True)
    shares, sums, held = [], [], []
    while loop.job.running():
        shares.append(6 // loop.job.world)
        with loop.job.step() as step:
            plain(loop, step)
            loop.job.busy("a word, and no block")
            step.commit()
        held.append(loop.job.blocks._innermost)
        with loop.job.busy("evaluation"):
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            sums.append(float(total))
    assert loop.rehearsed() == [""]
    assert (shares, sums) == ([3, *[6] * STEPS], [1.0] * STEPS)  # it trains alone then
    assert held == [None] * (STEPS + 1)  # no word lasts longer than the step that it was said in


def test_a_loop_that_makes_no_step_at_first_is_not_taken_for_a_rehearsal_later() -> None:
    loop = Loop(rehearse=True)
    assert loop.job.running()
    loop.run(plain)
    assert loop.rehearsed() == [""] and [step for _, _, step in loop.places] == [1, 2, 3]
