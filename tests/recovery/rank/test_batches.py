"""The loop over a step's micro-batches, in a job of one rank; and who may ask for elastic sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainchaos.chaos.errors import ScenarioError
from trainchaos.recovery.data.exclusion_index import ExclusionIndex
from trainchaos.recovery.rank.job import Job, JobConfig
from trainchaos.recovery.rank.joining import JoinError, ScriptSettings, SupervisorSettings, settle
from trainchaos.recovery.rank.standalone import STARTED_TOGETHER, lone_job
from trainchaos.recovery.rank.step import Step

STEPS, BATCH = 3, 8


def job_of(determinism: Any, world: int = 4) -> tuple[Job, nn.Module]:
    """A rank that is left alone of so many."""
    config = JobConfig(
        process="alone",
        world=world,
        determinism=determinism,
        steps=STEPS,
        global_batch=BATCH,
        samples=64,
        seed=5,
        checkpoint_dir=None,
        checkpoint_every=0,
        checkpoint_keep=1,
    )
    job = lone_job(config)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.4), nn.Linear(5, 1))
    job.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), clip_norm=1.0)
    return job, model


def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
    x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in samples])
    return model(x).square().sum()


def one_by_one(model: nn.Module, step: Step) -> list[list[int]]:
    taken = []
    for samples in step.batches():
        taken.append(samples)
        step.backward(loss_of(model, samples))
    return taken


def trained(
    job: Job, model: nn.Module, each: Callable[[nn.Module, Step], Any] = one_by_one
) -> list[Any]:
    taken = []
    while job.running():
        with job.step() as step:
            taken.append(each(model, step))
            step.commit()
    return taken


def test_an_elastic_rank_computes_a_micro_batch_for_each_rank_of_the_full_job() -> None:
    job, model = job_of("elastic")
    for number, taken in enumerate(trained(job, model), start=1):
        assert [len(samples) for samples in taken] == [2, 2, 2, 2]
        assert [sample for samples in taken for sample in samples] == job.due(number)


def test_otherwise_there_is_one_and_it_is_the_same_loop() -> None:
    def at_once(model: nn.Module, step: Step) -> list[list[int]]:
        step.backward(loss_of(model, step.samples))
        return [step.samples]

    found = []
    for each in (one_by_one, at_once):
        job, model = job_of("default")
        found.append((trained(job, model, each), job.state.digests()))
    assert found[0] == found[1]
    assert [len(taken) for taken in found[0][0]] == [1] * STEPS


def test_another_number_of_parts_gives_another_sum() -> None:
    digests = []
    for world in (4, 4, 2):
        job, model = job_of("elastic", world)
        trained(job, model)
        digests.append(job.state.digests()["parameters"])
    assert digests[0] == digests[1] != digests[2]


def at_once(model: nn.Module, step: Step) -> None:
    step.backward(loss_of(model, step.samples))


def twice(model: nn.Module, step: Step) -> None:
    one_by_one(model, step)
    one_by_one(model, step)


def left_out(model: nn.Module, step: Step) -> None:
    for _ in step.batches():
        pass


def two_backward(model: nn.Module, step: Step) -> None:
    for samples in step.batches():
        step.backward(loss_of(model, samples))
        step.backward(loss_of(model, samples))


def broken_off(model: nn.Module, step: Step) -> None:
    for samples in step.batches():
        step.backward(loss_of(model, samples))
        break


@pytest.mark.parametrize(
    ("each", "complaint"),
    [
        (at_once, r"for samples in step\.batches\(\)"),
        (twice, r"step\.batches\(\) was called twice"),
        (left_out, r"ended without step\.backward\(\)"),
        (two_backward, r"step\.backward\(\) was called twice"),
        (broken_off, r"commit\(\) before backward\(\)"),
    ],
)
def test_a_loop_that_leaves_the_path_is_told(
    each: Callable[[nn.Module, Step], None], complaint: str
) -> None:
    job, model = job_of("elastic")
    with pytest.raises(RuntimeError, match=complaint):
        trained(job, model, each)


def test_a_sample_that_is_left_out_leaves_a_stand_in() -> None:
    job, model = job_of("elastic")
    job.state.skip = ExclusionIndex(dict.fromkeys(job.due(1)[1:], 1))
    first = trained(job, model)[0]
    assert first == [job.due(1)] * 4
    assert job.micro_batches(1)[1].count == 0


def test_a_loader_comes_after_attach() -> None:
    config = JobConfig(
        process="alone",
        world=1,
        steps=1,
        global_batch=1,
        samples=4,
        seed=0,
        checkpoint_dir=None,
        checkpoint_every=0,
        checkpoint_keep=1,
    )
    with pytest.raises(RuntimeError, match=r"job\.attach\(model, optimizer\) comes before"):
        lone_job(config).loader([1, 2, 3, 4])  # type: ignore[arg-type]


# ---- who may ask for it

FACTS = ScriptSettings(samples=64, steps=10, global_batch=8)


def settled(said: Any, **seat: Any) -> str:
    place = SupervisorSettings(supervisor="the scenario", process="w0", world=4, **seat)
    return settle(
        place,
        FACTS,
        checkpoint_dir=None,
        checkpoint_every=None,
        checkpoint_keep=None,
        determinism=said,
    ).determinism


def test_script_and_supervisor_agree_on_it() -> None:
    assert [settled(None), settled("elastic"), settled(None, determinism="elastic")] == [
        "default",
        "elastic",
        "elastic",
    ]
    with pytest.raises(
        JoinError, match="joins with determinism=elastic, the scenario says default"
    ):
        settled("elastic", determinism="default")


@pytest.mark.parametrize(
    ("seat", "complaint"),
    [
        ({"shards": 2}, "the model is sharded"),
        ({"batch": "shrink"}, "samples of missing ranks are left out"),
    ],
)
def test_a_join_that_cannot_be_elastic_is_refused(seat: dict[str, Any], complaint: str) -> None:
    with pytest.raises(JoinError, match=complaint):
        settled("elastic", **seat)


@pytest.mark.parametrize(
    ("workload", "recovery", "complaint"),
    [
        ("parallelism: {hsdp: {replicas: 2, shards: 2}}", "hot-spare", "use parallelism: ddp"),
        ("parallelism: fsdp", "hot-spare", "use parallelism: ddp"),
        ("ranks: 4", "{strategy: drop-replica, batch: shrink}", "use batch: constant"),
    ],
)
def test_a_scenario_that_cannot_be_elastic_is_refused(
    load_text: Callable[[str], Any], workload: str, recovery: str, complaint: str
) -> None:
    text = f"""
version: 1
name: elastic
workload: {{kind: mlp, determinism: elastic, {workload}}}
recovery: {recovery}
faults: []
"""
    with pytest.raises(ScenarioError, match=complaint):
        load_text(text)


@pytest.fixture
def load_text(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    from trainchaos.chaos.commands.shared.options import build_catalogue
    from trainchaos.chaos.loading.load import load

    def loaded(text: str) -> Any:
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return load(path, build_catalogue(), overrides=[], env={})

    yield loaded


@pytest.mark.parametrize("name", STARTED_TOGETHER)
def test_several_processes_without_a_supervisor_are_no_jobs_of_one_rank(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would write the same checkpoints."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(RuntimeError, match=f"{name}=4.*recovery.run --ranks 4"):
        job_of("default")
    monkeypatch.setenv(name, "1")
    job_of("default")
