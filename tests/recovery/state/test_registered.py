"""State of the user's own is saved, restored and copied with the job's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trainchaos.recovery.rank.job import Job, JobConfig
from trainchaos.recovery.rank.standalone import lone_job
from trainchaos.recovery.state.registered import Registered
from trainchaos.recovery.state.state import TrainState

STEPS = 6


class Counter:
    """Plain values, nested, and a tensor among them."""

    def __init__(self) -> None:
        self.seen = 0
        self.history: list[float] = []
        self.total = torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "more": {"history": list(self.history), "total": self.total}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.history = state["seen"], list(state["more"]["history"])
        self.total = state["more"]["total"]

    def add(self) -> None:
        self.seen += 1
        self.history.append(self.seen / 3)
        self.total += self.seen


def built(folder: Path | None, *, seed: int = 1) -> tuple[Job, nn.Module, AveragedModel, Counter]:
    config = JobConfig(
        process="alone",
        world=1,
        steps=STEPS,
        global_batch=4,
        samples=64,
        seed=5,
        checkpoint_dir=folder,
        checkpoint_every=2,
        checkpoint_keep=3,
    )
    job = lone_job(config)
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    average, counter = AveragedModel(model), Counter()
    job.attach(model, torch.optim.Adam(model.parameters(), lr=0.1))
    job.register("average", average, update=lambda: average.update_parameters(model))
    job.register("counter", counter, update=counter.add)
    return job, model, average, counter


def train(job: Job, model: nn.Module, until: int = STEPS) -> None:
    while job.running():
        with job.step() as step:
            step.backward(
                model(torch.tensor([[float(i), 1.0, 2.0] for i in step.samples])).square().sum()
            )
            step.commit()
        if job.done == until:
            return


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_restored_job_ends_as_if_it_had_gone_on(tmp_path: Path) -> None:
    whole = built(None)
    train(*whole[:2])
    assert whole[3].seen == STEPS
    train(*built(tmp_path)[:2], until=5)
    job, model, average, counter = built(tmp_path, seed=2)
    counter.add()  # what a fresh object holds does not matter
    train(job, model, until=5)
    assert counter.seen == 5 and counter.total.tolist() == [15.0, 15.0], (
        "restored at 4, and one more"
    )
    train(job, model)
    assert job.state.digests() == whole[0].state.digests()
    assert counter.state_dict()["more"]["history"] == whole[3].history
    for mine, theirs in zip(average.parameters(), whole[2].parameters(), strict=True):
        assert mine.tolist() == theirs.tolist()


def test_tensors_and_values_are_part_of_what_is_copied() -> None:
    job, _, _, counter = built(None)
    counter.add()
    state = job.state
    assert state.tensors()["user.counter.more.total"] is not None
    assert "user.average.module.weight" in state.tensors()
    assert state.scalars()["registered"] == {
        "average": {},
        "counter": {"seen": 1, "more": {"history": [1 / 3]}},
    }
    before = state.digests()["optimizer"]
    counter.total += 1
    assert state.digests()["optimizer"] != before


class Copies(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone()}


class Odd(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


def test_what_cannot_be_stored_or_copied_is_refused() -> None:
    registered = Registered()
    registered.add("counter", Counter(), None)
    for name, thing, kind, complaint in (
        ("other", Copies(), TypeError, "other.total is copied by state_dict"),
        ("other", Odd(), TypeError, "the state of other holds what is neither tensor nor JSON"),
        ("counter", Counter(), ValueError, "'counter' is registered already"),
        ("a b", Counter(), ValueError, "'a b' is no identifier"),
    ):
        with pytest.raises(kind, match=complaint):
            registered.add(name, thing, None)
    with pytest.raises(
        ValueError, match=r"holds \['average'\] of job.register, and the script registers"
    ):
        registered.load({"average": {}})


def test_a_state_that_holds_other_objects_is_refused() -> None:
    model = nn.Linear(2, 1)
    plain = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None, seed=5)
    with pytest.raises(ValueError, match="the script registers nothing"):
        plain.load_scalars(built(None)[0].state.scalars())
