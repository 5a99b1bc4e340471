"""What a training loop holds: a ``job``, made by ``recovery.join`` or a rank's entry point, and its steps.

    job.attach(model, optimizer, scheduler, clip_norm=1.0)
    while job.running():
        with job.step() as step:
            inputs = load(step.samples)
            loss = model(inputs)            # the sum of the losses of step.samples
            step.backward(loss)
            step.commit()

A failure inside the ``with`` block ends the block; ``job.running()`` then waits for the supervisor, takes
part in the new generation, and the step is done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from chaos.events import EventWriter, Kind
from recovery import marks, order
from recovery.agent import Agent
from recovery.checkpoints import Checkpoint, Disk
from recovery.jobconfig import JobConfig
from recovery.marks import MarkPage
from recovery.mechanisms import checkpoint as checkpointing
from recovery.mechanisms.dialing import Address, by_rank
from recovery.mechanisms.examine import LossOf, samples_to_blame
from recovery.mechanisms.group import GenerationLost, Group
from recovery.mechanisms.reduce import GradientReducer, Reduced
from recovery.mechanisms.state import TrainState
from recovery.mechanisms.step import NonFinite, Probe, Step
from recovery.mechanisms.transfer import copy_state
from recovery.saving import Saving
from recovery.wire import Abort, Finished, Join, Parked, Ready, Status, Stop
from recovery.wire import Joined as JoinedMessage

__all__ = ["Job", "JobConfig"]


class Job:
    """One rank's membership in a supervised training job. Use from the training thread only."""

    def __init__(self, config: JobConfig, agent: Agent, page: MarkPage, writer: EventWriter) -> None:
        self.config = config
        self.agent = agent
        self.marks = page
        self.writer = writer
        self.probe: Probe | None = None
        self.disk: Disk | None = None  # a fault injector's voice in place of the disk's
        self._saving = Saving(write=self._write, send=agent.channel.send, clock_s=time.perf_counter)
        self.loss_of: LossOf | None = None
        self.spoil: Callable[[list[int], Tensor], Tensor] | None = None  # a fault injector's hand on the loss
        self.examine = 0  # the step at which a non-finite value is to be traced to samples
        self.on_attach: Callable[[Job], None] | None = None
        self.dial: Callable[[str, Address], Address] | None = None  # the way to a process, if not straight
        self.current: Step
        self.over = False
        self._in_step = False
        self.rank = -1
        self.peers: tuple[str, ...] = ()  # the other processes of the generation
        self.world = 0
        self.generation = 0
        self._group: Group | None = None
        self._retired: Group | None = None
        self._fresh = True  # holds the initial state, which nothing else could bring back
        self._valid = False  # a fresh process holds nothing of the job until it has joined a generation
        self._pausing = False
        self._announced = False
        self._attached = False

    @property
    def seed(self) -> int:
        """Of the job: seed whatever must be alike on all ranks, such as the model's initial values, with it."""
        return self.config.seed

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.config.steps

    @property
    def device(self) -> str:
        """Where this process is to train: ``cpu`` or ``cuda:<index>``."""
        return self.config.device

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        clip_norm: float = 0.0,
        loss_of: LossOf | None = None,
    ) -> None:
        """Register what training changes. ``clip_norm``: limit of the gradients' norm, 0 for none; ``loss_of``: the
        summed loss of given samples, by which one that nobody can compute is found and left out.

        Raises TypeError, naming the parameter, when gradients cannot be reduced in one floating-point type, and for a
        model wrapped in DistributedDataParallel, whose own reduction would get in the way.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise TypeError("attach the model itself, not DistributedDataParallel: the job reduces gradients")
        self.state = TrainState(model, optimizer, scheduler, seed=self.config.seed)
        self.reducer = GradientReducer(model, max_world=self.config.world, entering=self.marks.collective)
        self.reducer.check = self.check
        self.reducer.reached = self._in_backward
        self._clip_norm = clip_norm
        self.loss_of = loss_of or self.loss_of
        self._attached = True
        model.register_forward_pre_hook(self._in_forward)
        if self.on_attach is not None:
            self.on_attach(self)

    def ready(self) -> None:
        """Listen to the supervisor, and tell it that this process is built; ``running`` does it if nobody did."""
        config = self.config
        self.reducer.rehearse()
        self.agent.status = self._status
        self.agent.start()
        self._announced = True
        self.agent.channel.send(
            Ready(
                steps=config.steps, samples=config.samples, global_batch=config.global_batch, seed=config.seed
            )
        )  # fmt: skip

    def check(self) -> None:
        """Raise GenerationLost if the supervisor aborted this generation."""
        if self.agent.aborted_generation >= self.generation > 0:
            raise GenerationLost("aborted by the supervisor")

    def running(self) -> bool:
        """True when a step should be trained; waits for the supervisor where needed. False: end of the job.

        A spare waits here until it is needed. Raises RuntimeError before ``attach``.
        """
        if not self._attached:
            raise RuntimeError("job.attach(model, optimizer) comes before job.running()")
        if not self._announced:
            self.ready()
        while True:
            if self._group is not None and self.state.step < self.config.steps:
                return True
            if self._group is not None:
                self.marks.enter(marks.IDLE)
                self.agent.channel.send(Finished(step=self.state.step))
            order = self.agent.orders.get()
            if isinstance(order, Stop):
                self._leave()
                self.over = True
                return False
            if isinstance(order, Abort):
                # An abort that arrives after this rank already left is answered by the park message it sent then.
                if self._group is not None and order.generation >= self.generation:
                    self._park("aborted")
            else:
                self._join(order)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """One attempt at the next step; a lost generation or a refused step ends the block without an error."""
        number = self.state.step + 1
        self.marks.begin(self.generation, number)
        self.marks.enter(marks.DATA)
        step = self.current = self._attempt(number)
        self._in_step = True
        try:
            self._write(
                Kind.BATCH_TAKEN, step=number, rank=self.rank, samples=step.samples[: step.count],
                epoch=(number - 1) * self.config.global_batch // self.config.samples,
            )  # fmt: skip
            try:
                if self.probe is not None and self.probe.active:
                    self.probe.at(number, "data")
            except GenerationLost:
                # The block cannot be skipped: its first phase() raises this again, or its reduction fails.
                pass
            self.state.seed_step(self.rank, number)
            self.reducer.begin()
            yield step
            step.require_commit()
            if self._pausing and self.state.step < self.config.steps:
                self._park("pause")
        except GenerationLost as error:
            aborted = self.agent.aborted_generation >= self.generation
            self._park("aborted" if aborted else "failed", error=str(error))
        except NonFinite as error:
            self._write(
                Kind.NONFINITE_CAUGHT, step=number, rank=self.rank, blamed=list(error.blamed), what="loss or gradient"
            )  # fmt: skip
            samples = samples_to_blame(self, step, error.blamed)
            self._park("nonfinite", blamed=list(error.blamed), samples=samples)
        finally:
            self._in_step = False

    def apply(self, step: Step, reduced: Reduced) -> None:
        """Let the optimizer use the reduced gradients, and commit; called by ``Step.commit``."""
        state = self.state
        self._fresh = False
        lr = state.optimizer.param_groups[0]["lr"]
        if self._clip_norm:
            self.reducer.clip(reduced.grad_norm, self._clip_norm)
        state.apply()
        state.step = step.number
        step.end_phase()
        self._write(
            Kind.STEP_COMMITTED, step=step.number, rank=self.rank, world=self.world, samples=reduced.samples,
            loss=reduced.loss, lr=float(lr), wire_bytes=self.reducer.wire_bytes, grad_norm=reduced.grad_norm,
            optimizer_step=state.optimizer_step(), scheduler_step=state.scheduler_step(),
            seconds={k: round(v, 6) for k, v in step.seconds.items()},
        )  # fmt: skip
        self.marks.commit(step.number)
        self._pausing = reduced.pause
        if self.probe is not None:
            self.probe.committed(step.number)
        every = self.config.checkpoint_every
        due = every > 0 and step.number % every == 0
        if due or step.number == self.config.steps:
            self._write(Kind.STATE_DIGEST, step=step.number, rank=self.rank, **state.digests())
        if (due or reduced.save) and self.config.checkpoint_dir is not None:
            if self.rank == 0:
                self._save(step.number)
            else:
                self._in_checkpoint(step.number)

    def _save(self, number: int) -> None:
        """Write a checkpoint. A failed save is reported and never kills training."""
        self.marks.enter(marks.CHECKPOINT)
        directory = self.config.checkpoint_dir
        assert directory is not None
        since_s = self._saving.begin(number)
        self._in_checkpoint(number)
        save = partial(
            checkpointing.save, self.state, directory, generation=self.generation, disk=self._on_disk
        )
        if self._saving.attempt(number, save, since_s=since_s, passes=(GenerationLost,)):
            self._saving.prune(directory, self.config.checkpoint_keep, disk=self.disk)

    def _on_disk(self, what: str, path: Path) -> None:
        self.marks.touch()  # a slow disk is no hang
        if self.disk is not None:
            self.disk(what, path)

    def _in_checkpoint(self, number: int) -> None:
        if self.probe is not None and self.probe.active:
            self.probe.at(number, "checkpoint")

    def due(self, number: int) -> list[int]:
        """The global batch of a step, without the samples that the job leaves out."""
        config = self.config
        ids = order.batch(number, config.global_batch, config.samples, config.seed)
        return order.without(ids, number, self.state.skip)

    def _attempt(self, number: int) -> Step:
        config, ids = self.config, self.due(number)
        if not ids:
            raise RuntimeError(f"every sample of step {number} is left out")
        world = config.world if config.batch == "shrink" else self.world
        part = order.share(self.rank, world, len(ids))
        # A rank without a share takes part all the same, with a sample of another's that counts for nothing.
        return Step(self, number, ids[part.start : part.stop] or ids[:1], count=len(part))

    def _in_forward(self, *_: object) -> None:
        """The model is called: the forward phase begins, if the loop has not said so itself."""
        if torch.compiler.is_compiling():
            return  # nothing of this belongs into a compiled graph
        if self._in_step and self.current.in_data:
            self.current.phase("forward")

    def _in_backward(self) -> None:
        if self.probe is not None and self.probe.active:
            self.probe.at(self.state.step + 1, "backward")

    def _status(self) -> Status:
        joining, over = self.marks.read().phase == "joining", self.state.step >= self.config.steps
        member: Any = "joining" if joining else "finished" if over else "training"
        place = "waiting" if self._group is None else member
        return Status(place=place, generation=self.generation, step=self.state.step, valid=self._valid)

    def _join(self, order: Join) -> None:
        self._leave()
        self.rank, self.world, self.generation = order.rank, len(order.members), order.generation
        self.peers = tuple(name for name in order.members if name != self.config.process)
        self.writer.generation = order.generation
        self.examine = order.examine
        self.marks.begin(order.generation, self.state.step)
        self.marks.collective(0)
        self.marks.enter(marks.JOINING)
        self._pausing = False
        self.agent.pause_wanted = self.agent.save_wanted = False
        group = Group(
            generation=order.generation, rank=order.rank, world=self.world, store_port=order.store_port,
            backend=self.config.backend, timeout_s=self.config.collective_timeout_s, check=self.check,
            dial=by_rank(self.dial, order.members),
        )  # fmt: skip
        self._group = group
        self.agent.entering(group)
        try:
            self.check()
            started = time.perf_counter()
            group.form()
            seconds = round(time.perf_counter() - started, 6)
            self._write(Kind.GROUP_FORMED, rank=self.rank, world=self.world, seconds=seconds)
            name = self._take_state(order, group)
            self.state.skip |= order.skip  # a checkpoint may be older than a decision
            self.check()
        except GenerationLost as error:
            aborted = self.agent.aborted_generation >= self.generation
            self._park("aborted" if aborted else "failed", error=str(error))
            return
        self.reducer.new_generation(group)
        self.marks.commit(self.state.step)
        self.agent.channel.send(
            JoinedMessage(generation=self.generation, step=self.state.step, checkpoint=name)
        )

    def _take_state(self, order: Join, group: Group) -> str | None:
        """Get hold of the generation's state; returns the checkpoint's name if this rank restored one."""
        started = time.perf_counter()
        name: str | None = None
        origin = "kept" if self.state.step else "initial"
        if order.restore and self.rank == 0:
            self._valid = False
            directory = self.config.checkpoint_dir
            found = checkpointing.restore_newest(self.state, directory, self._refused) if directory else None
            if found is None and not self._fresh:
                raise RuntimeError(
                    "no checkpoint verifies, and this process no longer holds the initial state"
                )
            name = found.name if found else None
            origin = "checkpoint" if found else "initial"
            self._valid = True
        if self.rank in order.receivers:
            self._valid = self._fresh = False
            origin = "peer"
        if order.source is not None and order.receivers:
            receive = self.rank in order.receivers
            copy_state(self.state, group, source=order.source, receive=receive, progress=self.marks.touch)
        self._valid = True
        self._write(
            Kind.STATE_READY, step=self.state.step, rank=self.rank, origin=origin,
            source=order.source if origin == "peer" else name, seconds=round(time.perf_counter() - started, 6),
        )  # fmt: skip
        return name

    def _refused(self, bad: Checkpoint, reason: str) -> None:
        self._write(Kind.CHECKPOINT_REFUSED, step=bad.step, checkpoint=bad.name, reason=reason)

    def _park(
        self, why: Any, *, error: str = "", blamed: list[int] | None = None, samples: list[int] | None = None
    ) -> None:
        generation = self.generation
        if why in ("pause", "nonfinite"):
            # All ranks park here after the same collective: breaking connections now could cut off one still
            # finishing it.
            self._retired, self._group = self._group, None
            self.agent.left()
            self.marks.enter(marks.IDLE)
        else:
            self._leave()
        self._write(Kind.PARKED, step=self.state.step, valid=self._valid, why=why)
        self.agent.channel.send(
            Parked(
                generation=generation, step=self.state.step, valid=self._valid, why=why, error=error,
                blamed=blamed or [], samples=samples or [],
            )
        )  # fmt: skip

    def _leave(self) -> None:
        for group in (self._group, self._retired):
            if group is not None:
                group.leave()
        self._group = self._retired = None
        self.agent.left()
        self.marks.enter(marks.IDLE)

    def _write(self, kind: Kind, /, **data: Any) -> None:
        self.marks.wrote(self.writer.write(kind, **data).seq)
