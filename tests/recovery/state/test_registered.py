"""State of the user's own is saved, restored and copied with the job's."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR
from torch.optim.swa_utils import AveragedModel

from trainchaos.recovery.rank.job import Job, JobConfig
from trainchaos.recovery.rank.standalone import lone_job
from trainchaos.recovery.state.registered import Attributes, LoadError, Registered, Schedule
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
    before = state.digests()
    counter.total += 1
    counter.add()
    changed = {name for name, digest in state.digests().items() if before[name] != digest}
    assert changed == {"registered.counter"}


class Plain:
    """Values of any kind; ``load`` says how it takes them over."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Copies(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"total": self.state["total"].clone()}


class Adds(Plain):
    """As Megatron's scheduler."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state["n"] += state["n"]


class Forgets(Plain):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {"n": 0, "total": torch.zeros(2)}


def test_what_cannot_be_stored_or_copied_is_refused() -> None:
    registered = Registered()
    registered.add("counter", Counter(), None)
    total = torch.ones(2)
    for name, thing, kind, complaint in (
        ("other", Copies({"total": total}), TypeError, "other.total is copied by state_dict"),
        ("other", Plain({"a": [Plain({})]}), TypeError, "other.a.0 is a Plain, which can be nei"),
        ("other", Adds({"n": 1}), LoadError, "Adds.load_state_dict did not .*: other.n is 2 in"),
        ("other", Forgets({"n": 0, "total": total}), LoadError, "other.total has other values"),
        ("other", 3, TypeError, "other is a int without state_dict and load_state_dict"),
        ("other", Plain({"a.b": total, "a": {"b": total}}), TypeError, "two tensors of one name"),
        ("counter", Counter(), ValueError, "'counter' is registered already"),
        ("a b", Counter(), ValueError, "'a b' is no identifier"),
    ):
        with pytest.raises(kind, match=complaint):
            registered.add(name, thing, None)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"holds \['average'\] of job.register, and the script registers"
    ):
        registered.load({"average": {}})


def test_types_come_back() -> None:
    there, here = Registered(), Registered()
    value = {"by": {0: 1, (1, 2): math.inf}, "shape": (1, 2), "seen": {3}, "raw": b"x"}
    there.add("it", Plain(value), None)
    here.add("it", Plain({"by": {}, "shape": (0, 0), "seen": set(), "raw": b""}), None)
    here.load(json.loads(json.dumps(there.scalars())))
    assert here["it"].state_dict() == value


def test_checkpoints_of_before_which_have_keys_sorted_are_read() -> None:
    registered, model = Registered(), nn.Linear(1, 1)
    registered.add("counter", Counter(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts: list[Any] = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)]
    schedule = Schedule(SequentialLR(optimizer, parts, [3]), optimizer)
    for there in (registered, schedule):
        there.load(json.loads(json.dumps(there.scalars(), sort_keys=True)))


def test_a_class_makes_one_too() -> None:
    registered = Registered()
    registered.add("counter", Counter, None)
    assert isinstance(registered["counter"], Counter)


def test_what_adds_is_made_anew_for_each_load() -> None:
    registered, calls = Registered(), []

    def made() -> Adds:
        calls.append(1)
        return Adds({"n": 0})

    registered.add("it", made, lambda thing: thing.state.update(n=thing.state["n"] + 1))
    registered.update()
    scalars = registered.scalars()
    registered.update()
    before = len(calls)
    registered.load(scalars)
    assert registered["it"].state_dict() == {"n": 1} and len(calls) == before + 1


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda g: torch.rand(3, generator=g).tolist()),
        (random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
        (numpy.random.default_rng(3), lambda g: g.random(3).tolist()),
        (
            numpy.random.Generator(numpy.random.MT19937(3)),
            lambda g: g.integers(0, 9, 5, dtype="i4").tolist(),
        ),
    ],
    ids=["torch", "random", "pcg", "mersenne"],
)
def test_a_generator_of_the_scripts_own_draws_the_same_again(generator: Any, draw: Any) -> None:
    registered = Registered()
    registered.add("noise", generator, None)
    draw(generator)
    scalars, held, first = registered.scalars(), registered.held(), draw(generator)
    registered.load(scalars)
    assert draw(generator) == first
    registered.put_back(held)
    assert draw(generator) == first


def test_attributes_of_a_module_are_state_too() -> None:
    module = nn.Linear(1, 1)
    module.calls, module.seen = 3, {"a": (1,)}  # type: ignore[assignment]
    registered = Registered()
    registered.add("calls", Attributes(module, "calls", "seen"), None)
    held = registered.held()
    module.calls, module.seen = 4, {}  # type: ignore[assignment]
    registered.put_back(held)
    assert (module.calls, module.seen) == (3, {"a": (1,)})
    with pytest.raises(AttributeError, match="has no attribute 'call'"):
        Attributes(module, "call")


def test_a_state_that_holds_other_objects_is_refused() -> None:
    model = nn.Linear(2, 1)
    plain = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None, seed=5)
    with pytest.raises(ValueError, match="the script registers nothing"):
        plain.load_scalars(built(None)[0].state.scalars())
