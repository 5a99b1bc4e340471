"""The job that every compared stack trains, for the training scripts of all of them.

It is the built-in workload ``gpt``: the same model, optimizer, scheduler, clipping, random numbers
and global batch in each step for the same seed, whatever the stack. A script of a stack holds a
``Training``, wraps ``training.model`` as the stack wants it, and calls in each step ``ids``,
``loss``, ``backward``, ``apply`` and ``report``; where the stack trains by DistributedDataParallel,
``train`` is all of that.

These scripts run in environments that have torch, numpy, pydantic and xxhash and find this
repository by PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainchaos import beacon
from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.compare.environments.stack import CHECKPOINTS, CommonJob
from trainchaos.harness.launch.workload import BuildContext
from trainchaos.harness.workloads.gpt import SIZES, Gpt
from trainchaos.recovery.data import order

KEPT = 2
"""Checkpoints kept by ``save``."""
_SAVED = re.compile(r"step-(\d{8})\.pt")
Point = Literal["data", "forward", "backward", "gradient", "optimizer", "saving"]


def point(name: Point, step: int) -> str | None:
    """Where a fault can be put; see ``beacon.point``."""
    return beacon.point(name, step)


def join_group() -> None:
    """Torch's default group on gloo, whose collectives give up after ``JOB_GROUP_TIMEOUT`` seconds;
    without it torch's default, 30 minutes.
    """
    limit = os.environ.get("JOB_GROUP_TIMEOUT")
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(limit)) if limit else None)


class Training:
    """The model and what trains it, in one process. ``samples``: size of the data set;
    ``checkpoints``: directory.
    """

    def __init__(self, job: CommonJob, scratch: Path, *, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        if job.size not in SIZES:
            raise ScenarioError(
                f"there is no size {job.size!r}", hint=f"sizes are {', '.join(SIZES)}"
            )
        self.job = job
        self.block = SIZES[job.size].block
        built = Gpt(size=cast("Any", job.size)).build(
            BuildContext(data=job.data, device=device, seed=job.seed, steps=job.steps)
        )
        assert built.scheduler is not None
        self.model, self.optimizer, self.scheduler = built.model, built.optimizer, built.scheduler
        self.clip_norm = built.clip_norm
        self.fetch = built.load
        self.samples = (job.data.stat().st_size - 1) // self.block
        self.checkpoints = scratch / CHECKPOINTS
        self.in_flight: Tensor | None = None
        self._step = 0
        self._watch_backward()

    @classmethod
    def from_environment(
        cls, env: Mapping[str, str] = os.environ, *, device: str = "cpu"
    ) -> Training:
        """As ``CommonJob.environment`` and CHAOS_SCRATCH say. Raises ScenarioError when they do
        not.
        """
        job = CommonJob.from_environment(env)
        if not env.get("CHAOS_SCRATCH"):
            raise ScenarioError("CHAOS_SCRATCH is not set", hint="start it by chaos compare")
        return cls(job, Path(env["CHAOS_SCRATCH"]), device=device)

    def ids(self, step: int, rank: int, world: int) -> list[int]:
        """This rank's share of the global batch of ``step`` (from 1), by
        ``recovery.data.order``.
        """
        part = order.share(rank, world, self.job.global_batch)
        batch = order.batch(step, self.job.global_batch, self.samples, self.job.seed)
        return batch[part.start : part.stop]

    def loss(self, net: nn.Module, step: int, rank: int, ids: list[int]) -> Tensor:
        """The forward pass through ``net`` (the model, or what wraps it): the *sum* over ``ids`` of
        each sample's mean loss, a scalar. Random numbers are those of the built-in job: of (seed,
        rank, step).
        """
        self._step = step
        _seed(self.job.seed, rank, step)
        point("data", step)
        batch = self.fetch(ids)
        point("forward", step)
        logits = net(batch[:, :-1])
        total = functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        )
        return total / self.block

    def backward(self, loss: Tensor) -> None:
        """The backward pass. Told to, this rank's gradients become NaN before anything reduces
        them.
        """
        with poisoned(self.model, self._step):
            loss.backward()

    def apply(self) -> None:
        """Clip, optimizer, scheduler, and gradients back to nothing. Gradients are the mean over
        the global batch.
        """
        point("optimizer", self._step)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def report(self, step: int, loss: float, samples: int) -> None:
        """Every rank says so when a step is done. ``loss``: mean over the global batch;
        ``samples``: of this rank.
        """
        beacon.step(step, loss=loss, samples=samples)

    def state(self, step: int) -> dict[str, Any]:
        """All that is needed to go on after ``step``."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": step,
        }

    def restore(self, state: Mapping[str, Any]) -> int:
        """Take over what ``state`` returned; returns its step."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return int(state["step"])

    def save(self, step: int) -> None:
        """Write a checkpoint as plain training scripts do: ``torch.save`` under another name, then
        a rename; the two newest are kept. Nothing is synced and nothing verified. There is a point
        in the middle of the writing.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        path = self.checkpoints / f"step-{step:08}.pt"
        memory = io.BytesIO()
        torch.save(self.state(step), memory)
        data = memory.getbuffer()
        with path.with_suffix(".tmp").open("wb") as stream:
            stream.write(data[: len(data) // 2])
            stream.flush()
            point("saving", step)
            stream.write(data[len(data) // 2 :])
        path.with_suffix(".tmp").replace(path)
        for old in self.saved()[:-KEPT]:
            old.unlink(missing_ok=True)

    def load(self) -> int:
        """Go on from the newest checkpoint, and return its step; 0 without one. A file that torch
        refuses is an error, as it is in the scripts that stacks document: nobody there falls back
        to an older one. torch checks the form of the file and not its values, so a changed value is
        loaded.
        """
        found = self.saved()
        return self.restore(torch.load(found[-1], weights_only=True)) if found else 0

    def saved(self) -> list[Path]:
        """Whole checkpoint files, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        return sorted(path for path in self.checkpoints.iterdir() if _SAVED.fullmatch(path.name))

    def _watch_backward(self) -> None:
        """The point ``backward`` lies in the midst of the pass, with some gradients computed and
        some not.
        """
        weights = [parameter for parameter in self.model.parameters() if parameter.ndim == 2]
        weights[len(weights) // 2].register_hook(self._in_backward)

    def _in_backward(self, gradient: Tensor) -> None:
        point("backward", self._step)


class poisoned:
    """Context of a backward pass: where the point ``gradient`` says "nan", every gradient that this
    rank computes in it is NaN, whoever reduces them. It is asked before the pass, as gradients may
    be on their way during it.
    """

    def __init__(self, model: nn.Module, step: int) -> None:
        self._model, self._step = model, step
        self._hooks: list[Any] = []
        self._before: float | None = None

    def __enter__(self) -> None:
        if point("gradient", self._step) == "nan":
            self._hooks = [
                p.register_hook(self._spoil) for p in self._model.parameters() if p.requires_grad
            ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _spoil(self, gradient: Tensor) -> Tensor:
        spoilt = torch.full_like(gradient, torch.nan)
        if self._before is None:
            self._before = float(gradient.sum())
            beacon.did("nan", self._step, before=self._before, after=float(spoilt.sum()))
        return spoilt


def train(
    training: Training, net: nn.Module, first: int, *, save: Callable[[int], None] | None = None
) -> None:
    """Train with torch's default group from step ``first`` + 1 to the end; ``net``: the model in
    DistributedDataParallel. ``save``: called on every rank when a checkpoint is due; None: rank 0
    calls ``training.save``.
    """
    for step in range(first + 1, training.job.steps + 1):
        train_step(training, net, step)
        if step % training.job.every == 0:
            if save is not None:
                save(step)
            elif dist.get_rank() == 0:
                training.save(step)


def train_step(training: Training, net: nn.Module, step: int) -> float:
    """One step of ``train`` without its checkpoint; returns the mean loss over the global batch,
    the same on all ranks. Its sum travels while the backward pass computes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = training.ids(step, rank, world)
    loss = training.loss(net, step, rank, ids)
    total = loss.detach().double()
    # a view is kept beyond the step, which refers to the tensor from C++: else gloo's thread,
    # letting go of the tensor, wants Python's lock, while whoever takes a broken group down may
    # hold it and wait for that thread, for ever
    training.in_flight = total.view_as(total)
    word = dist.all_reduce(total, async_op=True)
    # DistributedDataParallel divides by the number of ranks; their shares need not be equal
    training.backward(loss * (world / training.job.global_batch))
    training.apply()
    if word is not None:
        word.wait()
    mean = float(total) / training.job.global_batch
    training.report(step, mean, len(ids))
    return mean


def _seed(seed: int, rank: int, step: int) -> None:
    """As ``recovery.state.state`` does, so that dropout is the same under every stack."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "big") >> 1
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value & 0xFFFFFFFF)
