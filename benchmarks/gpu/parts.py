"""Measurements of the GPU benchmark that need no supervisor, each run in a separate process; prints
JSON.

python -m benchmarks.gpu.parts {machine,nccl,state,faults} DEVICE SIZE
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from benchmarks.gpu.train import BATCH, LENGTHS, loss_of, make_model, make_optimizer, tokens_of
from trainchaos.chaos.faults.replica_desync import ReplicaDesync
from trainchaos.chaos.faults.tensor_corrupt import TensorCorrupt
from trainchaos.harness.rank.shims.tensors import TensorShim
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.reduce import GradientReducer
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.state.state import TrainState

ROUNDS = {"cuda": 10, "cpu": 3}
STEPS, WARM = {"cuda": 20, "cpu": 5}, 3
SPIN_CYCLES = 3_000_000_000  # a kernel of a second or two
LIMIT_S = 60.0
Figures = dict[str, Any]


def timed(device: torch.device, act: Callable[[], Any]) -> float:
    """Seconds until the device has finished the work of ``act``."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if stream:
        stream.synchronize()
    since_s = time.perf_counter()
    act()
    if stream:
        stream.synchronize()
    return time.perf_counter() - since_s


def group_of(device: torch.device, generation: int, port: int, check: Callable[[], None]) -> Group:
    """A process group of this process alone: NCCL on a GPU."""
    return Group(
        generation=generation,
        rank=0,
        world=1,
        store_port=port,
        timeout_s=LIMIT_S,
        check=check,
        device=str(device),
        backend="nccl" if device.type == "cuda" else "gloo",
    )


def machine(device: torch.device, size: str) -> Figures:
    """Facts about the machine."""
    found: Figures = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in make_model(size).parameters()),
    }
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "gpus": torch.cuda.device_count(),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def nccl(device: torch.device, size: str) -> Figures:
    """Times to form a group, abort it while the device is busy, and form it again; and step times
    with and without the job's reducer.
    """
    store, port = start_store()
    flag = SimpleNamespace(aborted=False)

    def check() -> None:
        if flag.aborted:
            raise GenerationLost("aborted")

    figures: Figures = {"form_s": [], "first_s": [], "abort_s": []}
    values = torch.ones(1 << 20, device=device)
    for generation in range(1, ROUNDS[device.type] + 1):
        flag.aborted = False
        group = group_of(device, generation, port, check)
        figures["form_s"].append(timed(device, group.form))
        figures["first_s"].append(timed(device, partial(_all_reduce, group, values)))
        figures["abort_s"].append(_aborted(device, group, values, flag))
        group.leave()
    flag.aborted = False
    group = group_of(device, ROUNDS[device.type] + 1, port, check)
    group.form()
    figures |= _steps(device, size, group)
    group.leave()
    del store
    return figures


def _all_reduce(group: Group, values: Tensor) -> None:
    group.wait(group.start_all_reduce(values))


def _aborted(device: torch.device, group: Group, values: Tensor, flag: SimpleNamespace) -> float:
    """Seconds from an abort, while the training thread waits for a busy device, until that thread
    is free.
    """
    free = [0.0]

    def abort() -> None:
        flag.aborted, free[0] = True, time.perf_counter()
        group.abort()

    if device.type == "cuda":
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    timer = threading.Timer(0.05, abort)
    timer.start()
    with contextlib.suppress(GenerationLost):
        work = group.start_all_reduce(values)
        group.wait(work)
        while not flag.aborted:  # on a CPU no operation takes that long
            group.settle()
            timer.join(0.001)
        group.settle()
    ended = time.perf_counter()
    timer.join(LIMIT_S)
    return max(0.0, ended - free[0])


def _steps(device: torch.device, size: str, group: Group) -> Figures:
    """Seconds of a plain step and of one with the job's reducer, in turn."""
    model, plain = make_model(size).to(device), make_model(size).to(device)
    reducer = GradientReducer(model, max_world=2, entering=lambda _: None)
    reducer.new_generation(group)
    optimizer, plain_optimizer = (make_optimizer(list(m.parameters())) for m in (model, plain))
    tokens = tokens_of(range(BATCH), LENGTHS[size]).to(device)

    def ours() -> None:
        reducer.begin()
        loss = loss_of(model, tokens)
        reducer.expect()
        loss.backward()
        reduced = reducer.finish(rank=0, loss_sum=loss.detach(), count=len(tokens))
        reducer.clip(reduced.grad_norm, 1.0)
        optimizer.step()

    def theirs() -> None:
        plain_optimizer.zero_grad(set_to_none=False)
        loss = loss_of(plain, tokens) / len(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()

    figures: Figures = {"plain_step_s": [], "step_s": []}
    for _ in range(STEPS[device.type] + WARM):
        figures["plain_step_s"].append(timed(device, theirs))
        figures["step_s"].append(timed(device, ours))
    return {name: times[WARM:] for name, times in figures.items()}


def state(device: torch.device, size: str) -> Figures:
    """Digests of the whole state."""
    model = make_model(size).to(device)
    held = TrainState(model, make_optimizer(list(model.parameters())), None, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held.apply(0.0)
    figures: Figures = {"bytes": sum(part.nbytes for part in held.parts().values())}
    for name, act in (
        ("digest_s", held.digests),
        ("fingerprint_s", lambda: fingerprint(held)),
        ("finite_s", held.not_finite),
    ):
        act()
        figures[name] = [timed(device, act) for _ in range(ROUNDS[device.type])]
    return figures


def faults(device: torch.device, size: str) -> Figures:
    """Whether each tensor fault landed, by the rank's own digests; each on a separate model."""
    landed: dict[str, bool] = {}
    fields = TensorCorrupt.model_fields
    for surface, op in itertools.product(
        get_args(fields["surface"].annotation), get_args(fields["op"].annotation)
    ):
        with contextlib.suppress(ValidationError):
            landed[f"{surface} {op}"] = _lands(
                TensorCorrupt(surface=surface, op=op), surface, device
            )
    landed["replica-desync"] = _lands(ReplicaDesync(), "parameter", device)
    return {"landed": landed}


def _lands(fault: Any, surface: str, device: torch.device) -> bool:
    """Apply the fault to a step, and to the next one if the fault needs it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4)).to(device)
    held = TrainState(model, make_optimizer(list(model.parameters())), None, seed=1)
    shim, inputs = TensorShim(SimpleNamespace(state=held)), torch.randn(4, 8, device=device)  # type: ignore[arg-type]
    held.model(inputs).square().sum().backward()
    held.apply(0.0)  # so that the optimizer has state
    said: list[bool] = []
    later: list[Callable[[], None]] = []
    spoil: list[Callable[[Tensor], Tensor]] = []

    def say(evidence: Any) -> None:
        said.append(evidence["before"] != evidence["after"])

    target = SimpleNamespace(
        seed=1,
        step=1,
        tensors=shim.stored,
        next_step=later.append,
        poison_loss=spoil.append,
        change_forward=lambda where, change: shim.change_forward(where, change, 1, say),
        change_rng=lambda change: shim.change_rng(change, say),
    )
    seen: list[Any] = []
    for step in (1, 2):
        torch.manual_seed(step)
        before = shim.digest(surface)
        act = (lambda: fault.act(target)) if step == 1 else (later.pop() if later else None)
        if act is None:
            break
        if surface in ("input", "activation", "loss", "rng", "parameter"):
            act()
        seen.append(before != shim.digest(surface))
        loss = held.model(inputs + step).square().sum()
        while spoil:
            changed = spoil.pop()(loss)
            said.append(bool((changed != loss) | changed.isnan()))
            loss = changed
        held.model.zero_grad()
        loss.backward()
        if surface in ("gradient", "optimizer_state"):
            before = shim.digest(surface)
            act()
            seen.append(before != shim.digest(surface))
        held.apply(0.0)
    return any(said) or any(seen)


def main() -> None:
    """See the module."""
    part, name, size = sys.argv[1:]
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    known = {act.__name__: act for act in (machine, nccl, state, faults)}
    print(json.dumps(known[part](device, size)))


if __name__ == "__main__":
    main()
