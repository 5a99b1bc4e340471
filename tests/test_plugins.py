"""One contract for every plugin, found by the product's own finder.

A new file is tested without another edit.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from torch import nn

from chaos import plugins
from chaos.events import Event, Kind
from chaos.fault import Fault, Fidelity, Occurrence, Where
from harness.launcher import Launcher
from harness.workload import BuildContext, Trainable, Workload
from recovery import checkpoints
from recovery.strategy import Strategy

KINDS: dict[str, tuple[str, type[BaseModel]]] = {
    "fault": ("chaos.faults", Fault),
    "strategy": ("recovery.strategies", Strategy),
    "workload": ("harness.workloads", Workload),
    "launcher": ("harness.launchers", Launcher),
}
FOUND: list[tuple[str, str, type[BaseModel]]] = [
    (kind, name, model)
    for kind, (package, base) in KINDS.items()
    for name, model in plugins.load(package, base).items()
]
EVERY = pytest.mark.parametrize(("kind", "name", "model"), FOUND, ids=[f"{k}-{n}" for k, n, _ in FOUND])
REQUIRED = {"link-throttle": {"mbit_per_s": 20.0}, "straggler": {"factor": 3.0}}
"""Parameters without a default, and a value to try them with. Keep this short: a default is a kindness."""


def make(name: str, model: type[BaseModel], **params: Any) -> Any:
    """An instance with defaults where there are any."""
    return model(**REQUIRED.get(name, {}) | params)


def test_every_kind_has_plugins() -> None:
    assert {kind for kind, _, _ in FOUND} == set(KINDS)
    assert {"process-kill", "process-stop", "exception", "tensor-corrupt", "checkpoint-corrupt"} <= {
        name for kind, name, _ in FOUND if kind == "fault"
    }


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
    required = {n for n, f in model.model_fields.items() if f.is_required()}
    assert required == set(REQUIRED.get(name, {}))


@EVERY
def test_its_parameters_survive_yaml(kind: str, name: str, model: type[BaseModel]) -> None:
    plugin = make(name, model)
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    yaml.dump(plugin.model_dump(mode="json"), stream)
    assert model(**yaml.load(stream.getvalue())) == plugin


@EVERY
def test_its_schema_can_be_exported(kind: str, name: str, model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema.get("required", ())) == set(REQUIRED.get(name, {}))


# ---- faults

FAULTS = plugins.load("chaos.faults", Fault)
MILLISECOND = 1_000_000
OCCURRENCE = Occurrence(
    fault="f", number=0, process="w1", rank=1, checkpoint="step-00000050", step=20, time_ns=20_500
)


def event(
    what: Kind, actor: str, time_ns: int, /, *, step: int | None = None, seq: int = 0, **data: Any
) -> Event:
    return Event(kind=what, actor=actor, seq=seq, time_ns=time_ns, generation=1, step=step, data=data)


def commit(step: int, *, collective_s: float = 0.001, compute_s: float = 0.01) -> Event:
    """Step n of the target committed at time n thousand."""
    seconds = {"forward": compute_s, "backward": compute_s, "collective": collective_s, "optimizer": 0.001}
    return event(
        Kind.STEP_COMMITTED, "w1", step * 1000, step=step, rank=1, world=4, samples=16, loss=1.0, lr=0.1,
        grad_norm=1.0, optimizer_step=step, scheduler_step=step, seconds=seconds, wire_bytes=1_000_000,
    )  # fmt: skip


def calm(**late: Any) -> list[Event]:
    """A run in which nothing happened: forty steps, then everybody ends well."""
    steps = [commit(step, **(late if step > 20 else {})) for step in range(1, 41)]
    injected = event(
        Kind.FAULT_INJECTED, "orchestrator", 20_500, fault="f", kind="x", occurrence=0, target={}
    )
    ended = event(
        Kind.PROCESS_EXITED, "orchestrator", 99_000, process="w1", pid=1, exit_code=0, signal=None,
        expected=True, last_seq=9,
    )  # fmt: skip
    return [injected, *steps, ended]


def exited(*, process: str = "w1", code: int | None = None, signum: int | None = None) -> Event:
    return event(
        Kind.PROCESS_EXITED, "orchestrator", 21_000, process=process, pid=1, exit_code=code, signal=signum,
        expected=False, last_seq=1,
    )  # fmt: skip


def effect(number: int = 0, fault: str = "f", **evidence: Any) -> Event:
    return event(Kind.FAULT_EFFECT, "w1", 20_600, fault=fault, occurrence=number, evidence=evidence)


def raised(actor: str = "w1", kind: str = "InjectedError") -> Event:
    return event(Kind.ERROR_RAISED, actor, 20_600, type=kind, message="x")


@dataclass
class FakeProcess:
    """A process that takes signals."""

    signals: list[int] = field(default_factory=list)

    def signal(self, signum: int) -> None:
        self.signals.append(signum)

    def state(self) -> str:
        stopped = self.signals and self.signals[-1] == signal.SIGSTOP
        return "X" if signal.SIGKILL in self.signals else "T" if stopped else "S"


class FakeRank:
    """The training objects of a rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model(torch.ones(1, 3)).sum().backward()
        self.rank, self.step, self.seed = 1, 20, 5
        self.link: tuple[float | None, float] = (None, 0)
        self.slowdown = 1.0
        self.loss: Callable[[Any], Any] | None = None

    def set_link(self, bytes_per_s: float | None, latency_s: float) -> None:
        self.link = (bytes_per_s, latency_s)

    def set_slowdown(self, factor: float) -> None:
        self.slowdown = factor

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        self.loss = change

    def look(self) -> tuple[Any, ...]:
        """Everything a fault may change."""
        values = [p.detach().numpy().tobytes() for p in self.model.parameters()]
        grads = [p.grad.numpy().tobytes() for p in self.model.parameters() if p.grad is not None]
        return (*values, *grads, self.link, self.slowdown, self.loss is None)


class FakeCheckpoint:
    """A real checkpoint of small files, and an older one."""

    def __init__(self, folder: Path) -> None:
        self.older: Path | None = self._put(folder, 25).path
        self._checkpoint = self._put(folder, 50)
        self.path = self._checkpoint.path

    @staticmethod
    def _put(folder: Path, step: int) -> checkpoints.Checkpoint:
        staging = folder / ".staging"
        staging.mkdir(parents=True)
        (staging / "big.safetensors").write_bytes(bytes((step,)) * 1000)
        (staging / "small.safetensors").write_bytes(b"x")
        return checkpoints.commit(staging, folder, step, {})[0]

    def verify(self) -> str | None:
        try:
            checkpoints.verify(self._checkpoint)
        except checkpoints.CorruptCheckpoint as error:
            return str(error)
        return None


VARIANTS: dict[str, list[Mapping[str, Any]]] = {
    "checkpoint-corrupt": [{"mode": mode} for mode in ("bitflip", "truncate", "missing", "stale")],
    "tensor-corrupt": [
        {"surface": surface, "op": op}
        for surface in ("gradient", "parameter", "loss")
        for op in ("nan", "inf", "bitflip")
    ],
}
CASES = [(name, params) for name in FAULTS for params in VARIANTS.get(name, [{}])]
EVERY_FAULT = pytest.mark.parametrize(
    ("name", "params"), CASES, ids=["-".join([name, *map(str, params.values())]) for name, params in CASES]
)


def fault(name: str, params: Mapping[str, Any]) -> Fault:
    made: Fault = make(name, FAULTS[name], **params)
    return made


@EVERY_FAULT
def test_a_fault_finds_no_evidence_where_nothing_happened(name: str, params: Mapping[str, Any]) -> None:
    """The check can fail: an empty log, a calm run, and one in which it did its act without effect."""
    tried = fault(name, params)
    assert tried.landed(OCCURRENCE, []) is None
    assert tried.landed(OCCURRENCE, calm()) is None
    assert tried.landed(OCCURRENCE, [*calm(), effect(surface="gradient", op="nan")]) is None
    assert (
        tried.landed(OCCURRENCE, [*calm(), effect(before="aa", after="aa", verifier=None, os_state="S")])
        is None
    )


EVIDENCE: dict[str, list[Event]] = {
    "process-kill": [exited(signum=9)],
    "process-stop": [effect(os_state="T")],
    "exception": [raised(), exited(code=1)],
    "tensor-corrupt": [effect(before="aa", after="bb")],
    "checkpoint-corrupt": [effect(verifier="big.safetensors has SHA-256 1, not 2")],
    "link-throttle": calm(collective_s=0.4),
    "straggler": calm(compute_s=0.03),
}
ELSEWHERE: dict[str, list[list[Event]]] = {
    "process-kill": [[exited(process="w2", signum=9)], [exited(signum=11)], [exited(code=1)]],
    "process-stop": [
        [effect(number=1, os_state="T")], [effect(fault="g", os_state="T")], [effect(os_state="R")],
    ],
    "exception": [
        [raised()], [exited(code=1)], [raised(actor="w2"), exited(code=1)], [raised(), exited(code=0)],
        [raised(kind="OSError"), exited(code=1)], [raised(), exited(signum=9)],
    ],
    "tensor-corrupt": [
        [effect(number=1, before="aa", after="bb")], [effect(fault="g", before="aa", after="bb")],
    ],
    "checkpoint-corrupt": [[effect(number=1, verifier="bad")], [effect(fault="g", verifier="bad")]],
    "link-throttle": [calm(collective_s=0.0012), calm(collective_s=0.4)[:22]],
    "straggler": [calm(compute_s=0.012), calm(compute_s=0.03)[:22]],
}  # fmt: skip
"""What happened to somebody else, at another time, or too little."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_lands_on_evidence_of_its_own_effect_only(name: str) -> None:
    tried = fault(name, {})
    found = tried.landed(OCCURRENCE, EVIDENCE[name])
    assert found is not None
    assert found.witness
    assert found.evidence
    assert tried.landed(OCCURRENCE, EVIDENCE[name]) == found, "pure"
    for other in ELSEWHERE[name]:
        assert tried.landed(OCCURRENCE, other) is None, other[-1]


@EVERY_FAULT
def test_a_fault_changes_its_target_and_a_second_heal_changes_nothing(
    name: str, params: Mapping[str, Any], tmp_path: Path
) -> None:
    tried = fault(name, params)
    if tried.where is Where.PROCESS:
        process = FakeProcess()
        tried.act_on_process(process)
        assert process.state() != "S"
        tried.heal_process(process)
        healed = process.state()
        tried.heal_process(process)
        assert process.state() == healed
        assert healed == ("X" if name == "process-kill" else "S")
    elif tried.where is Where.CHECKPOINT:
        target = FakeCheckpoint(tmp_path)
        assert target.verify() is None
        assert tried.act_on_checkpoint(target, seed=3)
        assert target.verify() is not None
        assert checkpoints.newest_good(tmp_path, lambda *_: None)[0].step == 25  # type: ignore[index]
    else:
        act_in_rank(name, tried)


def act_in_rank(name: str, tried: Fault) -> None:
    target = FakeRank()
    before = target.look()
    if name == "exception":
        with pytest.raises(RuntimeError, match="injected failure"):
            tried.act_in_rank(target)
        return
    assert tried.act_in_rank(target)
    assert target.look() != before
    if target.loss is not None:
        loss = torch.tensor(2.5, requires_grad=True)
        assert float(target.loss(loss).detach()) != 2.5
    if tried.lasting:
        tried.heal_in_rank(target)
        assert target.look() == before
        tried.heal_in_rank(target)
        assert target.look() == before


@EVERY_FAULT
def test_a_fault_acts_nowhere_but_where_it_says(name: str, params: Mapping[str, Any], tmp_path: Path) -> None:
    tried = fault(name, params)
    acts: dict[Where, Callable[[], object]] = {
        Where.PROCESS: lambda: tried.act_on_process(FakeProcess()),
        Where.RANK: lambda: tried.act_in_rank(FakeRank()),
        Where.CHECKPOINT: lambda: tried.act_on_checkpoint(FakeCheckpoint(tmp_path), 1),
    }
    for where, act in acts.items():
        if where is not tried.where:
            with pytest.raises(TypeError, match="does not act"):
                act()
    assert tried.fidelity in Fidelity
    assert all(
        phase in ("data", "forward", "backward", "collective", "optimizer", "checkpoint")
        for phase in tried.phases
    )


@pytest.mark.parametrize("params", VARIANTS["tensor-corrupt"][:6], ids=str)
def test_the_same_seed_corrupts_the_same_elements(params: Mapping[str, Any]) -> None:
    def hit(seed: int) -> tuple[Any, ...]:
        target = FakeRank()
        target.seed = seed
        fault("tensor-corrupt", params).act_in_rank(target)
        return target.look()

    assert hit(1) == hit(1)
    assert len({hit(seed) for seed in range(20)}) > 1


def test_a_stale_checkpoint_without_an_older_one_or_with_a_damaged_one(tmp_path: Path) -> None:
    for name, damage in (("none", lambda p: None), ("manifest", lambda p: (p / "manifest.json").unlink())):
        target = FakeCheckpoint(tmp_path / name)
        assert target.older is not None
        damage(target.older)
        if name == "none":
            target.older = None
        assert fault("checkpoint-corrupt", {"mode": "stale"}).act_on_checkpoint(target, 1)
        assert target.verify() is not None


# ---- workloads

WORKLOADS = plugins.load("harness.workloads", Workload)
EVERY_WORKLOAD = pytest.mark.parametrize("name", WORKLOADS)
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


@pytest.mark.parametrize("name", plugins.load("harness.launchers", Launcher))
def test_a_launcher_opens_nothing_before_it_is_used(name: str) -> None:
    launcher = make(name, plugins.load("harness.launchers", Launcher)[name])
    assert launcher.session() is not None
