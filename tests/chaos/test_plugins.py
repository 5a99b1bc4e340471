"""One contract for every plugin, found by the product's own finder.

A new file is tested without another edit.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from tests.chaos.faults.test_faults import case_of
from trainchaos.chaos import plugins
from trainchaos.chaos.fault.base import Fault
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.workload import BuildContext, Trainable, Workload
from trainchaos.recovery.policy.strategy import Strategy

KINDS: dict[str, tuple[str, type[BaseModel]]] = {
    "fault": ("trainchaos.chaos.faults", Fault),
    "strategy": ("trainchaos.recovery.policy.strategies", Strategy),
    "workload": ("trainchaos.harness.workloads", Workload),
    "launcher": ("trainchaos.harness.launchers", Launcher),
}
FOUND: list[tuple[str, str, type[BaseModel]]] = [
    (kind, name, model)
    for kind, (package, base) in KINDS.items()
    for name, model in plugins.load(package, base).items()
]
EVERY = pytest.mark.parametrize(
    ("kind", "name", "model"), FOUND, ids=[f"{k}-{n}" for k, n, _ in FOUND]
)
REQUIRED = {name: case_of(name).required for name in plugins.load(plugins.FAULTS, Fault)}
REQUIRED["script"] = {"path": "train.py"}
"""Parameters without a default, and a value to try them with. Keep this short: a default is a
kindness.
"""


def make(name: str, model: type[BaseModel], **params: Any) -> Any:
    """An instance with defaults where there are any."""
    return model(**REQUIRED.get(name, {}) | params)


def test_every_kind_has_plugins() -> None:
    assert {kind for kind, _, _ in FOUND} == set(KINDS)
    assert {
        "process-kill",
        "process-stop",
        "exception",
        "tensor-corrupt",
        "checkpoint-corrupt",
    } <= {name for kind, name, _ in FOUND if kind == "fault"}


@EVERY
def test_it_says_what_it_is(kind: str, name: str, model: type[BaseModel]) -> None:
    text = model.__doc__
    assert text and model.__doc__ is not KINDS[kind][1].__doc__
    for parameter in model.model_fields:
        described = model.model_fields[parameter].description or f"``{parameter}``" in text
        assert described or kind in ("workload", "launcher"), f"{parameter} is explained nowhere"


@EVERY
def test_its_parameters_are_strict_and_frozen(kind: str, name: str, model: type[BaseModel]) -> None:
    plugin = make(name, model)
    with pytest.raises(ValidationError):
        make(name, model, no_such_parameter=1)
    with pytest.raises(ValidationError):
        setattr(plugin, next(iter(model.model_fields), "x"), 1)


@EVERY
def test_its_parameters_have_defaults_or_are_listed_as_required(
    kind: str, name: str, model: type[BaseModel]
) -> None:
    schema = model.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema.get("required", ())) == set(REQUIRED.get(name, {}))


@EVERY
def test_its_parameters_survive_yaml(kind: str, name: str, model: type[BaseModel]) -> None:
    plugin = make(name, model)
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    yaml.dump(plugin.model_dump(mode="json"), stream)
    assert model(**yaml.load(stream.getvalue())) == plugin


# ---- workloads

WORKLOADS = plugins.load(plugins.WORKLOADS, Workload)
BUILT = [name for name, kind in WORKLOADS.items() if kind.program is Workload.program]
"""Workloads whose model the harness builds; a script builds its own (tests/recovery/test_run.py).
"""

EVERY_WORKLOAD = pytest.mark.parametrize("name", BUILT)
SMALL: dict[str, dict[str, Any]] = {"mlp": {"samples": 64}, "gpt": {"data": __file__}}


def built(name: str, folder: Path, *, seed: int = 3) -> tuple[Trainable, int]:
    folder.mkdir(exist_ok=True)
    workload = WORKLOADS[name](**SMALL.get(name, {}))
    info = workload.prepare(folder)
    assert info.path.exists() and info.digest and info.about
    context = BuildContext(data=info.path, device="cpu", seed=seed, steps=10)
    return workload.build(context), info.samples


def gradient(trainable: Trainable, samples: list[int]) -> torch.Tensor:
    trainable.model.zero_grad()
    trainable.loss(trainable.load(samples)).backward()
    return torch.cat([p.grad.flatten() for p in trainable.model.parameters() if p.grad is not None])


@EVERY_WORKLOAD
def test_data_is_prepared_the_same_every_time(name: str, tmp_path: Path) -> None:
    digests = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        digests.append(WORKLOADS[name](**SMALL.get(name, {})).prepare(tmp_path / folder).digest)
    assert digests[0] == digests[1]


@EVERY_WORKLOAD
def test_ranks_build_the_same_model_from_the_same_seed(name: str, tmp_path: Path) -> None:
    def parameters(seed: int) -> bytes:
        torch.manual_seed(99 + seed)  # what the process drew before must not matter
        trainable, _ = built(name, tmp_path, seed=seed)
        return b"".join(p.detach().numpy().tobytes() for p in trainable.model.parameters())

    assert parameters(3) == parameters(3)
    assert parameters(3) != parameters(4)


@EVERY_WORKLOAD
def test_every_sample_can_be_loaded_and_they_differ(name: str, tmp_path: Path) -> None:
    trainable, samples = built(name, tmp_path)
    assert samples >= 2
    first, last = trainable.load([0]), trainable.load([samples - 1])
    assert first.shape == last.shape
    assert not torch.equal(first, last)
    assert len(trainable.load([0, 1, 0])) == 3


@EVERY_WORKLOAD
def test_the_loss_is_a_sum_over_samples(name: str, tmp_path: Path) -> None:
    trainable, samples = built(name, tmp_path)
    trainable.model.eval()
    ids = [0, 1, samples - 1, 5, 7]
    together = float(trainable.loss(trainable.load(ids)).detach())
    apart = sum(float(trainable.loss(trainable.load([i])).detach()) for i in ids)
    assert together == pytest.approx(apart, rel=1e-4)
    assert trainable.loss(trainable.load(ids)).ndim == 0


@EVERY_WORKLOAD
@pytest.mark.parametrize("cut", [1, 3])
def test_a_batch_may_be_split_anywhere(name: str, tmp_path: Path, cut: int) -> None:
    trainable, _ = built(name, tmp_path)
    trainable.model.eval()
    ids = [9, 2, 5, 11, 3]
    whole = gradient(trainable, ids)
    split = gradient(trainable, ids[:cut]) + gradient(trainable, ids[cut:])
    assert torch.allclose(whole, split, rtol=1e-3, atol=1e-5 * float(whole.abs().max()))


@EVERY_WORKLOAD
def test_training_draws_its_randomness_from_torch_alone(name: str, tmp_path: Path) -> None:
    trainable, _ = built(name, tmp_path)
    trainable.model.train()

    def loss() -> float:
        torch.manual_seed(5)
        return float(trainable.loss(trainable.load([1, 2, 3])).detach())

    assert loss() == loss()


@EVERY_WORKLOAD
def test_a_few_steps_learn_something(name: str, tmp_path: Path) -> None:
    trainable, _ = built(name, tmp_path)
    ids = list(range(8))
    losses = []
    for step in range(6):
        torch.manual_seed(step)
        trainable.optimizer.zero_grad()
        loss = trainable.loss(trainable.load(ids)) / len(ids)
        loss.backward()
        trainable.optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[3:]) < losses[0]
    assert trainable.parameters == sum(p.numel() for p in trainable.model.parameters())
    assert WORKLOADS[name](**SMALL.get(name, {})).typical_step_s() > 0


# ---- launchers


@pytest.mark.parametrize("name", plugins.load(plugins.LAUNCHERS, Launcher))
def test_a_launcher_opens_nothing_before_it_is_used(name: str) -> None:
    launcher = make(name, plugins.load(plugins.LAUNCHERS, Launcher)[name])
    assert launcher.session([], RunDirectory(Path())) is not None


@pytest.mark.parametrize("name", plugins.load(plugins.FAULTS, Fault))
def test_what_a_fault_declares_of_itself_is_a_trait_of_the_base_class(name: str) -> None:
    kind = plugins.load(plugins.FAULTS, Fault)[name]
    assert sorted(kind.__class_vars__ - Fault.__class_vars__) == []
