"""A model in DistributedDataParallel: trained by the job as the model itself would be, bit for bit,
with few changed lines; what the job cannot do is refused by name.
"""

from __future__ import annotations

import copy
import difflib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as torch_module

from tests.recovery.test_run import EPOCHS, Running, kill, start, unharmed
from tests.support.running import LIMIT_S, ROOT, supervised
from trainchaos import recovery
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.collectives.lasting.job_mesh import is_a_jobs
from trainchaos.recovery.collectives.lasting.wrapper import let_job_reduce, serve_wrappers
from trainchaos.recovery.rank.recipe import ModelRecipe

__all__ = ["start", "unharmed"]

PLAIN, KEPT = ROOT / "examples" / "ddp_plain.py", ROOT / "examples" / "ddp_kept.py"
MOST_CHANGED_LINES = 9


# ---- the wrapper by itself


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wrappers can be made, until the test ends."""
    made: Any = torch_module
    monkeypatch.setattr(made, "_get_default_group", made._get_default_group)
    serve_wrappers()
    yield


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), *more)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1, "init_sync": False},
    ],
    ids=str,
)
def test_a_wrapper_that_the_job_has_taken_over_exchanges_nothing(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    bare, net = network(), network()
    ddp = DistributedDataParallel(net, **options)
    assert let_job_reduce(ddp) is net
    for name in ("broadcast", "allgather"):
        monkeypatch.setattr(type(ddp.process_group), name, None)
    x = torch.randn(5, 3)
    for model in (bare, ddp, bare, ddp):
        model(x).square().sum().backward()
    with ddp.no_sync():
        ddp(x).square().sum().backward()
    bare(x).square().sum().backward()
    for name, parameter in bare.named_parameters():
        assert torch.equal(parameter.grad, net.get_parameter(name).grad), name
    for name, buffer in bare.named_buffers():
        assert torch.equal(buffer, net.get_buffer(name)), name
    assert set(ddp.state_dict()) == {f"module.{name}" for name in bare.state_dict()}
    with pytest.raises(RuntimeError, match="different numbers of steps"), ddp.join():
        pass
    with pytest.raises(RuntimeError, match=r"has no .*hook.* in a job: attach"):
        ddp.register_comm_hook(None, lambda state, bucket: bucket)


@pytest.mark.slow
@pytest.mark.usefixtures("served")
def test_wrappers_of_wrappers_and_of_parts_are_all_turned_off() -> None:
    part = DistributedDataParallel(nn.Linear(2, 2))
    net = network(part)
    inner = DistributedDataParallel(net)
    outer = DistributedDataParallel(inner)
    assert let_job_reduce(outer) is net
    assert let_job_reduce(outer) is net, "again"
    outer(torch.randn(5, 3)).sum().backward()
    assert part.module.weight.grad is not None
    compiled = torch.compile(DistributedDataParallel(network()), backend="eager")
    assert let_job_reduce(compiled) is compiled
    compiled(torch.randn(5, 3)).sum().backward()


@pytest.mark.usefixtures("served")
def test_a_copy_of_a_wrapper_is_made_before_and_after() -> None:
    """As torch's AveragedModel makes it."""
    ddp = DistributedDataParallel(network())
    before = copy.deepcopy(ddp)
    let_job_reduce(ddp)
    x = torch.randn(5, 3)
    for each in (before, copy.deepcopy(ddp)):
        with torch.no_grad():
            assert torch.equal(each.eval()(x), ddp.eval()(x))


@pytest.mark.usefixtures("served")
def test_a_wrapper_that_is_not_attached_says_so_in_its_first_backward() -> None:
    ddp = DistributedDataParallel(network())
    with pytest.raises(RuntimeError, match=r"reduced gradients by itself: .*job.attach\(ddp"):
        ddp(torch.randn(5, 3)).sum().backward()


def hooked(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, lambda state, bucket: bucket)


def hooked_in_c(ddp: DistributedDataParallel) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def hooked_buffers(ddp: DistributedDataParallel) -> None:
    ddp._register_buffer_comm_hook(None, lambda state, buffers: None)


def several_devices(ddp: DistributedDataParallel) -> None:
    ddp.is_multi_device_module = True  # without GPUs there is but one


def ignoring(ddp: DistributedDataParallel) -> None:
    ddp.parameters_to_ignore = {"0.weight"}


def mixed(ddp: DistributedDataParallel) -> None:
    ddp.mixed_precision = object()  # type: ignore[assignment]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (hooked, "communication hook"),
        (hooked_in_c, "communication hook"),
        (hooked_buffers, "communication hook"),
        (several_devices, r"several devices \(cpu\): use one, job.device"),
        (ignoring, r"leaves parameters out \(0.weight\)"),
        (mixed, "torch.autocast"),
    ],
)
def test_what_the_job_would_not_do_is_refused_by_name(
    change: Callable[[DistributedDataParallel], None], complaint: str
) -> None:
    ddp = DistributedDataParallel(network())
    change(ddp)
    with pytest.raises(TypeError, match="DistributedDataParallel .*" + complaint):
        let_job_reduce(nn.Sequential(ddp))
    assert ddp.require_backward_grad_sync, "nothing is changed"


@pytest.mark.usefixtures("served")
def test_parameters_reduced_late_are_refused_by_name() -> None:
    net = network()
    late = dict(net.named_parameters())
    ddp = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("2.bias", late["2.bias"])],
        param_to_hook_all_reduce=late["0.weight"],
    )
    with pytest.raises(TypeError, match="leaves parameters out"):
        let_job_reduce(ddp)


# ---- in scripts


def train(
    *,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    backward: Callable[[recovery.Step, Tensor], None] = lambda step, loss: loss.backward(),
    attached: Callable[[Any], nn.Module] = lambda model: model,
) -> tuple[list[float], list[float]]:
    """Train without a supervisor; returns the losses and what is left of a layer."""
    job = recovery.join(samples=60, steps=6, global_batch=3, seed=4)
    torch.manual_seed(job.seed)
    model = wrap(nn.Linear(3, 1))
    job.attach(attached(model), torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    try:
        while job.running():
            with job.step() as step:
                x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in step.samples])
                loss = model(x).square().mean()
                backward(step, loss)
                step.commit()
                losses.append(loss.item())
    finally:
        if is_a_jobs():
            dist.destroy_process_group()
    return losses, [value.item() for each in model.parameters() for value in each.flatten()]


def of_the_sum(step: recovery.Step, loss: Tensor) -> None:
    step.backward(loss * len(step.samples))


@pytest.mark.slow
def test_backward_of_a_mean_is_that_of_the_sum_and_the_wrapper_changes_nothing() -> None:
    bare = train(wrap=lambda model: model, backward=of_the_sum)
    assert train() == bare
    assert train(backward=of_the_sum) == bare, "step.backward still takes the sum"
    compiled = train(wrap=lambda net: torch.compile(DistributedDataParallel(net), backend="eager"))
    assert compiled == bare


@pytest.mark.usefixtures("served")
def test_a_model_in_shards_is_not_wrapped() -> None:
    wrapped = nn.Sequential(DistributedDataParallel(network()))
    recipe = ModelRecipe(wrapped, torch.optim.SGD(network().parameters()), None, None)
    with pytest.raises(TypeError, match="attach the model itself"):
        recipe.check(shards=2)


def twice(step: recovery.Step, loss: Tensor) -> None:
    loss.backward()
    loss.backward()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"backward": twice}, "called twice in one step"),
        (
            {"backward": lambda step, loss: (loss * float("nan")).backward()},
            "step 1: the loss or a gradient is not finite",
        ),
        (
            {"backward": lambda step, loss: loss.backward(retain_graph=True)},
            r"give the loss to step.backward\(loss\)",
        ),
        ({"attached": lambda ddp: ddp.module, "backward": of_the_sum}, "gradients by itself"),
        (
            {"wrap": lambda model: model},  # its loss is a sum, so that this might be a mistake
            r"give the loss to step.backward\(loss\)",
        ),
    ],
)
def test_a_loop_that_does_what_a_job_cannot_is_told_so(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        train(**options)


def test_a_wrapper_over_a_group_of_the_scripts_is_refused_by_name() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="over a process group of the script's"):
            train()
    finally:
        dist.destroy_process_group()


# ---- with several ranks

LOOP = """
import os, signal, torch
from torch.nn.parallel import DistributedDataParallel
from trainchaos import recovery
from trainchaos.chaos.events.log import Event, Kind
job = recovery.join(samples=60, steps=6, global_batch=3, seed=4)
torch.manual_seed(job.seed)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
while job.running():
    with job.step() as step:
        for samples in step.batches():
            x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in samples])
            loss = model(x).square().mean()
            loss.backward()
        if job.rank == 1 and job.generation == 1 and step.number == 4 and KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        step.commit()
"""


def losses_of(events: dict[str, list[Event]]) -> list[float]:
    """Of the steps, as the ranks committed them; all alike."""
    found: dict[int, set[float]] = {}
    for event in (each for actor in events.values() for each in actor):
        if event.kind is Kind.STEP_COMMITTED:
            found.setdefault(event.step or 0, set()).add(event.data["loss"])
    assert sorted(found) == list(range(1, 7))
    return [loss for step in sorted(found) for (loss,) in [found[step]]]


def digests_of(events: dict[str, list[Event]]) -> list[object]:
    """Of the state that the job ended with, on each rank."""
    return [
        {name: value for name, value in event.data.items() if name != "rank"}
        for actor in events.values()
        for event in actor
        if event.kind is Kind.STATE_DIGEST and event.step == 6
    ]


@pytest.mark.real
def test_uneven_shares_and_a_killed_rank_leave_the_losses_of_one_process(tmp_path: Path) -> None:
    def of_the_global_batch(step: recovery.Step, loss: Tensor) -> None:
        assert len(step.samples) == 3
        loss.backward()

    alone, _ = train(backward=of_the_global_batch)
    killed = LOOP.replace("KILL", "True")
    ranks = supervised(tmp_path / "job", killed, "--ranks", "2", "--spares", "1")
    assert losses_of(ranks) == pytest.approx(alone, rel=1e-5)
    assert {1, 2} == {e.generation for e in ranks["w0"] if e.kind is Kind.STEP_COMMITTED}


@pytest.mark.real
@pytest.mark.long
def test_an_elastic_job_that_lost_a_rank_ends_with_the_state_of_the_bare_model(
    tmp_path: Path,
) -> None:
    elastic = LOOP.replace("seed=4", 'seed=4, determinism="elastic"')
    bare = (
        elastic.replace("DistributedDataParallel(torch", "(torch")
        .replace("loss.backward()", "step.backward(loss * len(x))")
        .replace("KILL", "False")
    )
    options = ("--ranks", "2", "--strategy", "drop-replica")
    expected = digests_of(supervised(tmp_path / "bare", bare, *options))
    ended = digests_of(supervised(tmp_path / "job", elastic.replace("KILL", "True"), *options))
    assert ended and expected and all(each == expected[0] for each in [*ended, *expected])


# ---- the example


def test_the_example_needs_fewer_changed_lines_than_without_the_wrapper() -> None:
    diff = list(difflib.ndiff(PLAIN.read_text().splitlines(), KEPT.read_text().splitlines()))
    added = [line for line in diff if line.startswith("+ ")]
    assert len(added) <= MOST_CHANGED_LINES, "\n".join(added)
    for kept in ("DistributedDataParallel(model)", "loss.backward()"):
        assert any(line.startswith("  ") and kept in line for line in diff), kept


@pytest.mark.real
@pytest.mark.long
def test_the_example_runs_by_itself(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(KEPT), "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("loss ") and not ran.stderr


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ((), True),
        (("--strategy", "hot-spare", "--spares", "1"), True),
        (("--strategy", "hot-spare", "--spares", "1", "--param", "sync=live"), True),
        (("--strategy", "checkpoint-restart", "--every", "15"), True),
        (("--strategy", "drop-replica"), False),
    ],
    ids=lambda value: "-".join(value[1::4]) or "unharmed" if isinstance(value, tuple) else "",
)
def test_a_wrapped_model_ends_with_the_state_of_the_bare_one(
    start: Callable[..., Running],
    unharmed: dict[str, object],
    options: tuple[str, ...],
    exact: bool,
) -> None:
    job = start("--ranks", "4", *options, KEPT, EPOCHS)
    if options:
        job.wait_for(lambda: job.trained(40))
        kill(job.pid_of("w2"))
    assert job.end() == 0, job.said
    assert ("w2 ended: signal 9" in job.said) == bool(options)
    if exact:
        assert job.digest() == unharmed
    else:
        assert job.digest(), "the same on all ranks"
