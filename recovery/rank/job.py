"""What a training loop holds: a ``job``, made by ``recovery.join`` or a rank's entry point, and its
steps.

    job.attach(model, optimizer, scheduler, clip_norm=1.0)
    while job.running():
        with job.step() as step:
            inputs = load(step.samples)
            loss = model(inputs)            # the sum of the losses of step.samples
            step.backward(loss)
            step.commit()

A failure inside the ``with`` block ends the block; ``job.running()`` then waits for the supervisor,
takes part in the new generation, and the step is done again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from chaos.events.log import EventWriter, Kind
from recovery.checkpoint.checkpointer import Checkpointer
from recovery.collectives.dialing import Address
from recovery.collectives.elastic import ElasticReducer
from recovery.collectives.group import GenerationLost, Group
from recovery.collectives.reduce import GradientReducer, Reduced, Reducer
from recovery.collectives.storelink import StoreLink
from recovery.data import order
from recovery.policy.interval import counts
from recovery.policy.jobconfig import JobConfig
from recovery.policy.layout import Layout
from recovery.rank.acquire_state import take_state
from recovery.rank.agent import Agent
from recovery.rank.complete_step import noted
from recovery.rank.examine import LossOf, samples_to_blame
from recovery.rank.fingerprint import tell_digest, tell_joined
from recovery.rank.job_api import JobFacts
from recovery.rank.membership import Membership, Why, stays_connected
from recovery.rank.recipe import MakeOptimizer, MakeScheduler, Recipe, rehearse
from recovery.rank.step import NonFinite, Probe, Step
from recovery.state.misuse import guard_scaling, in_step
from recovery.state.state import TrainState
from recovery.transport import progress_counters
from recovery.transport.progress_counters import MarkPage
from recovery.transport.versions import versions
from recovery.transport.wire import Abort, Join, LeaveOut, Ready, Stop

__all__ = ["Job", "JobConfig"]


class Job(JobFacts):
    """One rank's membership in a supervised training job. Use from the training thread only."""

    def __init__(
        self, config: JobConfig, agent: Agent, page: MarkPage, writer: EventWriter
    ) -> None:
        self.config = config
        self.agent = agent
        self.marks = page
        self.writer = writer
        self.probe: Probe | None = None
        self.loss_of: LossOf | None = None
        # a fault injector's hand on the loss
        self.spoil: Callable[[list[int], Tensor], Tensor] | None = None
        self.examine = 0  # the step at which a non-finite value is to be traced to samples
        self.on_attach: Callable[[Job], None] | None = None
        # the way to a process, if not straight
        self.dial: Callable[[str, Address], Address] | None = None
        self.current: Step
        self.over = False
        self._in_step = False
        self.rank = -1
        self.world = 0
        self.layout = Layout(world=1)
        self.member = Membership(agent.heard, steps=config.steps)
        self._group: Group | None = None
        self._link = StoreLink()
        self._retired: Group | None = None
        self._pausing = False
        self._announced = False
        self._attached = False
        if config.device.startswith("cuda"):
            # what the script does without saying where is done there
            torch.cuda.set_device(config.device)

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
        """Register what training changes. ``clip_norm``: limit of the gradients' norm, 0 for none;
        ``loss_of``: the summed loss of given samples, by which one that nobody can compute is found
        and left out.

        ``optimizer`` and ``scheduler`` may be functions that make them, of the list of parameters
        and of the optimizer; they have to be where the model is sharded. ``units``: modules that
        are then gathered one at a time (default: the children of each ModuleList).

        Raises TypeError, naming the parameter, when gradients cannot be reduced in one
        floating-point type, and for a model wrapped in DistributedDataParallel, whose own reduction
        would get in the way.
        """
        shards = self.config.shards
        self._recipe = Recipe(model=model, optimizer=optimizer, scheduler=scheduler, units=units)
        self._recipe.check(shards=shards)
        made = (None, None) if shards > 1 else self._recipe.make()
        self.state = TrainState(model, *made, seed=self.config.seed)
        self.checkpoints = Checkpointer(
            self.config,
            self.state,
            write=self._write,
            send=self.agent.channel.send,
            check=self.check,
            progress=self.marks.touch,
            entered=self._in_checkpoint,
            agreed=lambda: self.agent.heard.agreed,
            saves=lambda: self.marks.enter(progress_counters.CHECKPOINT),
        )
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
        from recovery.collectives.sharded import ShardedReducer

        self._sharded = ShardedReducer(model, entering=entering, waiting=self._in_exchange)
        return self._sharded

    def ready(self) -> None:
        """Listen to the supervisor, and tell it that this process is built; ``running`` does it if
        nobody did.
        """
        config = self.config
        if config.shards > 1:
            rehearse(config.shards, config.device)
        self.reducer.rehearse()
        self.agent.status = lambda number: self.member.status(self.state.step, number)
        self.agent.start()
        self._announced = True
        mine = versions(
            torch=torch.__version__, backend=config.backend, dtype=str(torch.get_default_dtype())
        )
        self.agent.channel.send(
            Ready(
                steps=config.steps,
                samples=config.samples,
                global_batch=config.global_batch,
                seed=config.seed,
                versions=mine,
            )
        )

    def check(self) -> None:
        """Raise GenerationLost if the supervisor aborted this generation."""
        if self.member.lost:
            raise GenerationLost("aborted by the supervisor")

    def running(self) -> bool:
        """True when a step should be trained; waits for the supervisor where needed. False: end of
        the job.

        A spare waits here until it is needed. Raises RuntimeError before ``attach``.
        """
        if not self._attached:
            raise RuntimeError("job.attach(model, optimizer) comes before job.running()")
        if not self._announced:
            self.ready()
        while True:
            if self.member.trains(self.state.step):
                self.marks.enter(progress_counters.BETWEEN)
                return True
            if finished := self.member.finished(self.state.step):
                bad = self.state.not_finite()
                self.marks.enter(progress_counters.IDLE)
                if bad is None:
                    self.agent.channel.send(finished)
                else:
                    self._refuse_end(bad)
            order = self.agent.orders.get()
            if isinstance(order, Stop):
                self._leave()
                self.checkpoints.close()
                self.over = True
                return False
            if isinstance(order, Abort):
                if self.member.leaves(order):
                    self._park("aborted")
            elif isinstance(order, LeaveOut):
                self.member.hears(order)
            else:
                self._join(order)

    def _refuse_end(self, bad: str) -> None:
        """No step follows whose loss or gradient would show what is wrong with the state of this
        rank.
        """
        print(
            f"after the last step {bad} is not finite: the state is refused",
            file=sys.stderr,
            flush=True,
        )
        self._write(
            Kind.NONFINITE_CAUGHT,
            step=self.state.step,
            rank=self.rank,
            blamed=[self.rank],
            what="state",
        )
        self._park("nonfinite", blamed=[self.rank])

    @contextmanager
    def step(self) -> Iterator[Step]:
        """One attempt at the next step; a lost generation or a refused step ends the block without
        an error.
        """
        number = self.state.step + 1
        self.marks.begin(self.generation, number)
        self.not_busy()
        self.marks.enter(progress_counters.DATA)
        step = self.current = Step(self, number, self.micro_batches(number))
        self._in_step = True
        try:
            self._write(
                Kind.BATCH_TAKEN,
                step=number,
                rank=self.rank,
                samples=step.samples[: step.count],
                epoch=(number - 1) * self.config.global_batch // self.config.samples,
            )
            try:
                if self.probe is not None and self.probe.active:
                    self.probe.at(number, "data")
            except GenerationLost:
                # The block cannot be skipped: its first phase() raises this again, or its reduction
                # fails.
                pass
            self.state.seed_step(self.rank, number)
            self.reducer.begin()
            with in_step():
                yield step
            step.require_commit()
            if self._pausing and self.state.step < self.config.steps:
                self._park("pause")
        except GenerationLost as error:
            self._park(self.member.why_lost(), error=str(error))
        except NonFinite as error:
            self._write(
                Kind.NONFINITE_CAUGHT,
                step=number,
                rank=self.rank,
                blamed=list(error.blamed),
                what="loss or gradient",
            )
            samples = samples_to_blame(self, step, error.blamed)
            self._park("nonfinite", blamed=error.blamed, samples=samples)
        finally:
            self._in_step = False

    def apply(self, step: Step, reduced: Reduced, *, late: bool = False) -> None:
        """Let the optimizer use the reduced gradients, and commit; called by ``Step.commit``.
        ``late``: others have done so in an earlier generation, and go on already.
        """
        state = self.state
        self.member.holding.applied()
        lr = state.optimizer.param_groups[0]["lr"]
        if self._clip_norm:
            self.reducer.clip(reduced.grad_norm, self._clip_norm)
        state.apply(reduced.loss)
        state.step, state.last = step.number, noted(step.number, reduced)
        if not late:
            step.end_phase()
        self._write(
            Kind.STEP_COMMITTED,
            step=step.number,
            rank=self.rank,
            world=self.world,
            samples=reduced.samples,
            loss=reduced.loss,
            lr=float(lr),
            wire_bytes=self.reducer.wire_bytes,
            grad_norm=reduced.grad_norm,
            optimizer_step=state.optimizer_step(),
            scheduler_step=state.scheduler_step(),
            seconds={k: round(v, 6) for k, v in step.seconds.items()},
        )
        self.marks.commit(step.number)
        self._pausing = reduced.pause
        if self.probe is not None:
            self.probe.committed(step.number)
        saving = counts(step.number, self.config.checkpoint_every, asked=reduced.save)
        if saving or step.number == self.config.steps:
            self._write(
                Kind.STATE_DIGEST,
                step=step.number,
                rank=self.rank,
                **state.digests(self.marks.touch),
            )
        if late:
            return
        tell_digest(self, step.number, saving=saving)
        self.checkpoints.after_commit(
            step.number,
            rank=self.rank,
            layout=self.layout,
            generation=self.generation,
            asked=reduced.save,
            pausing=reduced.pause,
        )
        self.marks.enter(progress_counters.BETWEEN)

    def _in_checkpoint(self, number: int, saves: bool) -> None:
        """This rank comes to a save; ``saves``: it takes part in writing it."""
        if saves:
            self.marks.enter(progress_counters.CHECKPOINT)
        if self.probe is not None and self.probe.active:
            self.probe.at(number, "checkpoint")

    def micro_batches(self, number: int, rank: int | None = None) -> list[order.MicroBatch]:
        """What a rank, if not said this one, computes of a step. Raises RuntimeError when nothing
        of it is left.
        """
        config, ids = self.config, self._batch(number)
        if not ids:
            raise RuntimeError(f"every sample of step {number} is left out")
        return order.micro_batches(
            ids,
            rank=self.rank if rank is None else rank,
            world=self.world,
            full=config.world,
            shrink=config.batch == "shrink",
            elastic=config.determinism == "elastic",
        )

    def _in_forward(self, *_: object) -> None:
        """The model is called: the forward phase begins, if the loop has not said so itself."""
        if torch.compiler.is_compiling():
            return  # nothing of this belongs into a compiled graph
        if self._in_step and self.current.in_data and self._inside() is None:
            self.current.phase("forward")

    def _in_exchange(self, begins: bool) -> None:
        """A sharded model waits for the other ranks of its replica, in the midst of a pass."""
        if begins:
            self.marks.enter(progress_counters.COLLECTIVE)
        self.current.wait(begins)

    def _in_backward(self) -> None:
        if self.probe is not None and self.probe.active:
            self.probe.at(self.state.step + 1, "backward")

    def _join(self, order: Join) -> None:
        self._leave()
        self.member.joins(order)
        self.rank, self.world = order.rank, order.world
        self.layout = Layout(world=self.world, shards=order.shards)
        self._take_part()
        self.writer.generation = order.generation
        self.examine = order.examine
        self.marks.begin(order.generation, self.state.step)
        self.marks.collective(0)
        self.marks.enter(progress_counters.JOINING)
        self._pausing = False
        group = Group(
            generation=order.generation,
            rank=order.rank,
            world=self.world,
            store_port=order.store_port,
            backend=self.config.backend,
            timeout_s=max(self.config.form_timeout_s, 2 * order.timeout_s),
            collective_timeout_s=self.config.collective_timeout_s,
            check=self.check,
            device=self.config.device,
            shards=order.shards,
            dial=self.dial,
            name=self.config.process,
            link=self._link,
            net=self.config.net,
        )
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
            # a checkpoint may be older than a decision
            self.state.skip.add(self.member.left_out(order))
            self.check()
        except GenerationLost as error:
            self._park(self.member.why_lost(), error=str(error))
            return
        self.member.begins(self.state.step)
        self.checkpoints.began(self.state.step)
        self.reducer.new_generation(group)
        self.marks.commit(self.state.step)
        tell_joined(self, name)
        self.member.joined()

    def _take_part(self) -> None:
        """Shard the model, if it is to be and is not yet."""
        if self.layout.shards != self.config.shards:
            raise RuntimeError(
                f"a job of {self.config.shards} shards is told that there are {self.layout.shards}"
            )
        if self.layout.shards > 1 and self._recipe.take_part(
            self.rank,
            self.layout,
            state=self.state,
            reducer=self._sharded,
            device=self.config.device,
        ):
            self._forward_hook.remove()  # the sharded model's own comes before it
            self._forward_hook = self.state.model.register_forward_pre_hook(
                self._in_forward, prepend=True
            )

    def _park(
        self, why: Why, *, error: str = "", blamed: Sequence[int] = (), samples: Sequence[int] = ()
    ) -> None:
        held, stays = self.member.holding, stays_connected(why)
        if self._in_step:
            left = self.reducer.broken_off() and not stays
            held.pending = (
                self.current.number if left and self.current.number > self.state.step else 0
            )
        if stays:
            self._retired, self._group = self._group, None
            self._out()
        else:
            self._leave()
        self.checkpoints.parked(lost=not stays)
        self._write(Kind.PARKED, step=self.state.step, valid=held.valid, why=why)
        said = self.member.parked(
            why, step=self.state.step, error=error, blamed=blamed, samples=samples
        )
        self.agent.channel.send(said)

    def _leave(self) -> None:
        for group in (self._group, self._retired):
            if group is not None:
                group.leave()
        self._group = self._retired = None
        self._out()

    def _out(self) -> None:
        self.member.left()
        self.agent.left()
        self.marks.enter(progress_counters.IDLE)

    def _write(self, kind: Kind, /, **data: Any) -> None:
        self.marks.wrote(self.writer.write(kind, **data).seq)
