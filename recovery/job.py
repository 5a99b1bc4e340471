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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from chaos.events import EventWriter, Kind
from recovery import marks, order
from recovery.agent import Agent
from recovery.interval import steps_of
from recovery.jobconfig import JobConfig
from recovery.layout import Layout
from recovery.marks import MarkPage
from recovery.mechanisms.checkpointer import Checkpointer
from recovery.mechanisms.dialing import Address
from recovery.mechanisms.elastic import ElasticReducer
from recovery.mechanisms.examine import LossOf, samples_to_blame
from recovery.mechanisms.facts import JobFacts
from recovery.mechanisms.fingerprint import tell_digest, tell_joined
from recovery.mechanisms.finishing import noted
from recovery.mechanisms.group import GenerationLost, Group
from recovery.mechanisms.misuse import guard_scaling, in_step
from recovery.mechanisms.recipe import MakeOptimizer, MakeScheduler, Recipe, rehearse
from recovery.mechanisms.reduce import GradientReducer, Reduced, Reducer
from recovery.mechanisms.state import TrainState
from recovery.mechanisms.step import NonFinite, Probe, Step
from recovery.mechanisms.storelink import StoreLink
from recovery.mechanisms.taking import Holding, take_state
from recovery.told import Told
from recovery.versions import versions
from recovery.wire import Abort, Finished, Join, LeaveOut, Parked, Ready, Status, Stop

__all__ = ["Job", "JobConfig"]


class Job(JobFacts):
    """One rank's membership in a supervised training job. Use from the training thread only."""

    def __init__(self, config: JobConfig, agent: Agent, page: MarkPage, writer: EventWriter) -> None:
        self.config = config
        self.agent = agent
        self.marks = page
        self.writer = writer
        self.probe: Probe | None = None
        self.loss_of: LossOf | None = None
        self.spoil: Callable[[list[int], Tensor], Tensor] | None = None  # a fault injector's hand on the loss
        self.examine = 0  # the step at which a non-finite value is to be traced to samples
        self.on_attach: Callable[[Job], None] | None = None
        self.dial: Callable[[str, Address], Address] | None = None  # the way to a process, if not straight
        self.current: Step
        self.over = False
        self._in_step = False
        self.rank = -1
        self.world = 0
        self.layout = Layout(world=1)
        self.generation = 0
        self._group: Group | None = None
        self._link = StoreLink()
        self._retired: Group | None = None
        self.holding = Holding()
        self.told = Told()
        self._pausing = False
        self._announced = False
        self._attached = False
        if config.device.startswith("cuda"):
            torch.cuda.set_device(config.device)  # what the script does without saying where is done there

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer,
        scheduler: LRScheduler | MakeScheduler | None = None,
        *,
        clip_norm: float = 0.0,
        loss_of: LossOf | None = None,
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        """Register what training changes. ``clip_norm``: limit of the gradients' norm, 0 for none; ``loss_of``: the
        summed loss of given samples, by which one that nobody can compute is found and left out.

        ``optimizer`` and ``scheduler`` may be functions that make them, of the list of parameters and of the
        optimizer; they have to be where the model is sharded. ``units``: modules that are then gathered one at a time
        (default: the children of each ModuleList).

        Raises TypeError, naming the parameter, when gradients cannot be reduced in one floating-point type, and for a
        model wrapped in DistributedDataParallel, whose own reduction would get in the way.
        """
        shards = self.config.shards
        self._recipe = Recipe(model=model, optimizer=optimizer, scheduler=scheduler, units=units)
        self._recipe.check(shards=shards)
        made = (None, None) if shards > 1 else self._recipe.make()
        self.state = TrainState(model, *made, seed=self.config.seed)
        self.checkpoints = Checkpointer(
            self.config, self.state, write=self._write, send=self.agent.channel.send, check=self.check,
            progress=self.marks.touch, entered=self._in_checkpoint, agreed=lambda: self.agent.agreed,
            saves=lambda: self.marks.enter(marks.CHECKPOINT),
        )  # fmt: skip
        self.reducer = self._make_reducer(model)
        self.reducer.check = self.check
        self.reducer.reached = self._in_backward
        self._clip_norm = clip_norm
        self.loss_of = loss_of or self.loss_of
        guard_scaling()
        self._attached = True
        self._forward_hook = model.register_forward_pre_hook(self._in_forward)
        if self.on_attach is not None:
            self.on_attach(self)

    def _make_reducer(self, model: nn.Module) -> Reducer:
        world, entering = self.config.world, self.marks.collective
        if self.config.shards == 1:
            elastic = self.config.determinism == "elastic"
            chosen = ElasticReducer if elastic else GradientReducer
            return chosen(model, max_world=world, entering=entering)
        from recovery.mechanisms.sharded import ShardedReducer

        self._sharded = ShardedReducer(model, entering=entering, waiting=self._in_exchange)
        return self._sharded

    def ready(self) -> None:
        """Listen to the supervisor, and tell it that this process is built; ``running`` does it if nobody did."""
        config = self.config
        if config.shards > 1:
            rehearse(config.shards, config.device)
        self.reducer.rehearse()
        self.agent.status = self._status
        self.agent.start()
        self._announced = True
        mine = versions(torch=torch.__version__, backend=config.backend, dtype=str(torch.get_default_dtype()))
        self.agent.channel.send(
            Ready(
                steps=config.steps, samples=config.samples, global_batch=config.global_batch, seed=config.seed,
                versions=mine,
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
            if self._group is not None and self.state.step < self.config.steps and not self._lost():
                self.marks.enter(marks.BETWEEN)
                return True
            if self._group is not None and self.state.step >= self.config.steps:
                self.marks.enter(marks.IDLE)
                self.agent.channel.send(Finished(step=self.state.step))
            order = self.agent.orders.get()
            if isinstance(order, Stop):
                self._leave()
                self.checkpoints.close()
                self.over = True
                return False
            if isinstance(order, Abort):
                # An abort that arrives after this rank already left is answered by the park message it sent then.
                if self._group is not None and order.generation >= self.generation:
                    self._park("aborted")
            elif isinstance(order, LeaveOut):
                self.told.hear(order)
            else:
                self._join(order)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """One attempt at the next step; a lost generation or a refused step ends the block without an error."""
        number = self.state.step + 1
        self.marks.begin(self.generation, number)
        self.not_busy()
        self.marks.enter(marks.DATA)
        step = self.current = Step(self, number, self.micro_batches(number))
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
            with in_step():
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

    def apply(self, step: Step, reduced: Reduced, *, late: bool = False) -> None:
        """Let the optimizer use the reduced gradients, and commit; called by ``Step.commit``. ``late``: others have
        done so in an earlier generation, and go on already."""
        state = self.state
        self.holding.fresh, self.holding.pending = False, 0
        lr = state.optimizer.param_groups[0]["lr"]
        if self._clip_norm:
            self.reducer.clip(reduced.grad_norm, self._clip_norm)
        state.apply(reduced.loss)
        state.step, state.last = step.number, noted(step.number, reduced)
        if not late:
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
        every = steps_of(self.config.checkpoint_every) or 0
        saving = reduced.save or (every > 0 and step.number % every == 0)
        if saving or step.number == self.config.steps:
            self._write(
                Kind.STATE_DIGEST, step=step.number, rank=self.rank, **state.digests(self.marks.touch)
            )
        if late:
            return
        tell_digest(self, step.number, saving=saving)
        self.checkpoints.after_commit(
            step.number, rank=self.rank, layout=self.layout, generation=self.generation, asked=reduced.save,
            pausing=reduced.pause,
        )  # fmt: skip
        self.marks.enter(marks.BETWEEN)

    def _in_checkpoint(self, number: int, saves: bool) -> None:
        """This rank comes to a save; ``saves``: it takes part in writing it."""
        if saves:
            self.marks.enter(marks.CHECKPOINT)
        if self.probe is not None and self.probe.active:
            self.probe.at(number, "checkpoint")

    def micro_batches(self, number: int, rank: int | None = None) -> list[order.MicroBatch]:
        """What a rank, if not said this one, computes of a step. Raises RuntimeError when nothing of it is left."""
        config, ids = self.config, self._batch(number)
        if not ids:
            raise RuntimeError(f"every sample of step {number} is left out")
        return order.micro_batches(
            ids, rank=self.rank if rank is None else rank, world=self.world, full=config.world,
            shrink=config.batch == "shrink", elastic=config.determinism == "elastic",
        )  # fmt: skip

    def _in_forward(self, *_: object) -> None:
        """The model is called: the forward phase begins, if the loop has not said so itself."""
        if torch.compiler.is_compiling():
            return  # nothing of this belongs into a compiled graph
        if self._in_step and self.current.in_data and self._inside() is None:
            self.current.phase("forward")

    def _in_exchange(self, begins: bool) -> None:
        """A sharded model waits for the other ranks of its replica, in the midst of a pass."""
        if begins:
            self.marks.enter(marks.COLLECTIVE)
        self.current.wait(begins)

    def _in_backward(self) -> None:
        if self.probe is not None and self.probe.active:
            self.probe.at(self.state.step + 1, "backward")

    def _status(self) -> Status:
        joining, over = self.marks.read().phase == "joining", self.state.step >= self.config.steps
        member: Any = "joining" if joining else "finished" if over else "training"
        told = self.agent.told_generation > self.generation  # and its training thread does not know yet
        place = "joining" if told else "waiting" if self._group is None else member
        held = self.holding
        return Status(
            place=place, generation=self.generation, step=self.state.step, valid=held.valid, pending=held.pending,
        )  # fmt: skip

    def _join(self, order: Join) -> None:
        self._leave()
        self.rank, self.world, self.generation = order.rank, order.world, order.generation
        self.layout = Layout(world=self.world, shards=order.shards)
        self._take_part()
        self.writer.generation = order.generation
        self.examine = order.examine
        self.marks.begin(order.generation, self.state.step)
        self.marks.collective(0)
        self.marks.enter(marks.JOINING)
        self._pausing = False
        self.agent.pause_wanted = self.agent.save_wanted = False
        group = Group(
            generation=order.generation, rank=order.rank, world=self.world, store_port=order.store_port,
            backend=self.config.backend, timeout_s=max(self.config.form_timeout_s, 2 * order.timeout_s),
            collective_timeout_s=self.config.collective_timeout_s, check=self.check, device=self.config.device,
            shards=order.shards, dial=self.dial, name=self.config.process, link=self._link, net=self.config.net,
        )  # fmt: skip
        self._group = group
        self.agent.entering(group)
        self.checkpoints.joined(self.rank, self.layout, order.generation)
        self.checkpoints.distrust(order.doubts, deletes=self.rank == 0)
        try:
            self.check()
            started = time.perf_counter()
            group.form()
            seconds = round(time.perf_counter() - started, 6)
            self._write(Kind.GROUP_FORMED, rank=self.rank, world=self.world, seconds=seconds)
            name = take_state(self, order, group, self._write)
            self.state.skip.add(self.told.of(order))  # a checkpoint may be older than a decision
            self.check()
        except GenerationLost as error:
            aborted = self.agent.aborted_generation >= self.generation
            self._park("aborted" if aborted else "failed", error=str(error))
            return
        self.holding.pending = 0
        self.checkpoints.began(self.state.step)
        self.reducer.new_generation(group)
        self.marks.commit(self.state.step)
        tell_joined(self, name)

    def _take_part(self) -> None:
        """Shard the model, if it is to be and is not yet."""
        if self.layout.shards != self.config.shards:
            raise RuntimeError(
                f"a job of {self.config.shards} shards is told that there are {self.layout.shards}"
            )
        if self.layout.shards > 1 and self._recipe.take_part(
            self.rank, self.layout, state=self.state, reducer=self._sharded, device=self.config.device
        ):
            self._forward_hook.remove()  # the sharded model's own comes before it
            self._forward_hook = self.state.model.register_forward_pre_hook(self._in_forward, prepend=True)

    def _park(
        self, why: Any, *, error: str = "", blamed: list[int] | None = None, samples: list[int] | None = None
    ) -> None:
        generation = self.generation
        held = self.holding
        if self._in_step:
            left = self.reducer.broken_off() and why in ("aborted", "failed")
            held.pending = self.current.number if left and self.current.number > self.state.step else 0
        if why in ("pause", "nonfinite"):
            # All ranks park here after the same collective: breaking connections now could cut off one still
            # finishing it.
            self._retired, self._group = self._group, None
            self.agent.left()
            self.marks.enter(marks.IDLE)
        else:
            self._leave()
        self.checkpoints.parked(lost=why not in ("pause", "nonfinite"))
        self._write(Kind.PARKED, step=self.state.step, valid=held.valid, why=why)
        self.agent.channel.send(
            Parked(
                generation=generation, step=self.state.step, valid=held.valid, why=why, error=error,
                blamed=blamed or [], samples=samples or [], pending=held.pending,
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
