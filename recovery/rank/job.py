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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.recovery.checkpoint.checkpointer import Checkpointer
from trainchaos.recovery.checkpoint.files.saving import RankHooks
from trainchaos.recovery.collectives import nccl
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.data.loader import LIMIT_S as LOADER_LIMIT_S
from trainchaos.recovery.data.loader import Loader
from trainchaos.recovery.detection.flight_recorder import recalled
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.examine import samples_to_blame
from trainchaos.recovery.rank.generation import Generations, announce
from trainchaos.recovery.rank.recipe import Attached, MakeOptimizer, ModelRecipe, Parallelize
from trainchaos.recovery.rank.rehearsal import Rehearsal
from trainchaos.recovery.rank.step import JobContext, LossOf, NonFinite, Step
from trainchaos.recovery.spares.live import Live
from trainchaos.recovery.state.misuse import guard_scaling, in_step
from trainchaos.recovery.state.registered import Generator, MakeScheduler, Scheduler, Stateful
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import Abort, LeaveOut, Stop

__all__ = ["Job", "JobConfig"]


class Job(JobContext):
    """One rank's membership in a supervised training job. Use from the training thread only.

    ``rank`` (-1 in a spare) and ``world`` may change from step to step. ``on_attach`` is a hook for
    a fault injector, as those of ``JobContext``.
    """

    generations: Generations
    rehearsal: Rehearsal
    wrapped: bool  # the model came in DistributedDataParallel

    def __init__(
        self, config: JobConfig, agent: RankAgent, page: MarkPage, writer: EventWriter
    ) -> None:
        super().__init__(config, agent, page, writer)
        self.on_attach: Callable[[Job], None] | None = None
        self.over = False
        self.last_work: Callable[[], object] | None = None
        self._attached: Attached | None = None
        self._announced = False
        if config.device.startswith("cuda"):
            torch.cuda.set_device(config.device)
        if config.shared_gpus:
            nccl.be_a_host_of_its_own()

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer,
        scheduler: Scheduler | MakeScheduler | None = None,
        *,
        clip_norm: float = 0.0,
        loss_of: LossOf | None = None,
        units: Sequence[nn.Module] | None = None,
        parallelize: Parallelize | None = None,
    ) -> None:
        """Register what training changes. ``clip_norm``: limit of the gradients' norm, 0 for none;
        ``loss_of``: returns the summed loss of given samples; it is used to find and leave out a
        sample that no rank can compute.

        ``optimizer`` and ``scheduler`` may be functions that make them, from the list of parameters
        and from the optimizer; a sharded model requires functions. A scheduler may be any object
        with ``step``, ``state_dict`` and ``load_state_dict``; a function makes it anew for each
        load. ``units``: modules of a sharded
        model that are gathered one at a time (default: the children of each ModuleList).
        ``parallelize``: of the model and ``job.mesh``, returns the model cut up for this rank, or
        its stage.

        A model wrapped in DistributedDataParallel is taken out of it, and the wrapper reduces
        nothing more. Nothing that is given changes. Raises TypeError, naming the parameter, when
        gradients cannot be reduced in one floating-point type, for a wrapper that does what the job
        does not, and for an optimizer or scheduler whose state would not be saved.
        """
        attached = Attached(
            ModelRecipe(model, optimizer, scheduler, units, parallelize),
            self.config,
            entering=self.marks.collective,
            progress=self.progress,
        )
        self.state, self.reducer = attached.state, attached.reducer
        lives = self.config.sync == "live"
        self.live = Live(self.config, self.state, self.write, self._not_fresh) if lives else None
        self.reducer.check = self.check
        self.reducer.reached = lambda: self.current.half_way()
        hooks = RankHooks(
            write=self.write,
            send=self.agent.channel.send,
            check=self.check,
            progress=self.marks.touch,
            entered=self._in_checkpoint,
            agreed=lambda: self.agent.heard.agreed,
            saves=lambda: self.marks.enter(progress_counters.CHECKPOINT),
        )
        self.checkpoints = Checkpointer(self.config, self.state, hooks)
        self.clip_norm = clip_norm
        self.loss_of = loss_of or self.loss_of
        guard_scaling()
        self._attached, self.wrapped = attached, attached.wrapped
        self.generations = Generations(self, attached)
        self.rehearsal = Rehearsal(self, attached)
        if self.on_attach is not None:
            self.on_attach(self)

    def _not_fresh(self) -> None:
        self.member.holding.fresh = False

    def register(
        self,
        name: str,
        thing: Stateful | Callable[[], Stateful] | Generator,
        *,
        update: Callable[..., object] | None = None,
    ) -> Stateful:
        """Make an object's state part of the job's: it is saved, restored and copied with the
        model, and what an attempt at a step changes in it is put back when the step is done again.
        Call between ``attach`` and the loop, on every rank alike. Returns the object.

        ``thing`` has ``state_dict`` and ``load_state_dict``, or is a random generator of torch,
        numpy or ``random``; ``recovery.Attributes(module, "count")`` stands for attributes of any
        object. Tensors in a ``state_dict`` must be the object's own; what else there may be says
        ``recovery.state.typed``. A load has to replace what was there; for an object that cannot
        do that, give a function that makes one, which is called for each load. ``update`` is called
        after each optimizer step, before anything is saved, with the object where a function made
        it: ``update=lambda: ema.update_parameters(model)``. Other changes belong before
        ``step.commit()``. Raises TypeError, naming the place, for state that would not come back as
        it is, LoadError, ValueError for a name that is taken, RuntimeError before ``attach``.
        """
        self._require_attached("register(name, object)")
        self.state.registered.add(name, thing, update)
        return self.state.registered[name]

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        num_workers: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        limit_s: float = LOADER_LIMIT_S,
    ) -> Loader:
        """A data loader whose workers compute this rank's samples ahead: ``loader.load(samples)``
        in a step. Make it after ``attach`` and before the loop.

        ``prefetch``: batches each worker computes ahead; ``collate_fn``: default torch's. With
        ``num_workers=0`` samples are computed when they are requested. ``limit_s``: how long data
        may take to come; a rank that waits for its workers is not taken for hung until then. Raises
        TypeError for an iterable dataset, RuntimeError before ``attach``.
        """
        self._require_attached("loader(dataset)")
        return Loader(
            self,
            dataset,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch=prefetch,
            limit_s=limit_s,
        )

    def _require_attached(self, call: str) -> Attached:
        if self._attached is None:
            raise RuntimeError(f"job.attach(model, optimizer) comes before job.{call}")
        return self._attached

    def at_end(self, work: Callable[[], object]) -> None:
        """Have ``work`` done once by one rank, after the last step and before the job counts as
        done: saving the model, for example. If that rank is lost meanwhile, another does it again,
        so it should replace what it finds. Call before the loop, on every rank alike.
        """
        self.last_work = work

    def ready(self) -> None:
        """Start to listen to the supervisor, and report that this process is built; ``running``
        does so if the script did not.
        """
        self._require_attached("ready()").rehearse()
        if self.live is not None:
            self.agent.on_feed = self.live.feeds.told
            if self.config.shards == 1:  # else once it is told which part to follow
                self.live.feeds.prepare(self.reducer)
                self.live.waits()
        back = self.config.backend
        self.agent.status = lambda n: self.member.status(self.state.step, n, self.fed_at)
        self.agent.recall = lambda n: recalled(n, back, self.generation, self.rank, nccl.recorder)
        self.agent.start()
        self._announced = True
        announce(self)

    def running(self) -> bool:
        """True when a step should be trained; waits for the supervisor where needed. False: end of
        the job.

        A spare waits here until it is needed. Raises RuntimeError before ``attach``.
        """
        self._require_attached("running()")
        if not self._announced:
            if self.rehearsal.begins():
                return True
            self.ready()
        while True:
            if self.member.trains(self.state.step):
                self.marks.enter(progress_counters.BETWEEN)
                return True
            if finished := self.member.finished(self.state.step):
                self.generations.finish(finished, self.last_work)
                self.last_work = None
            order = self.agent.orders.get()
            if isinstance(order, Stop):
                self.generations.end()
                self.over = True
                return False
            if isinstance(order, Abort):
                if self.member.must_park(order):
                    self.generations.park("aborted")
            elif isinstance(order, LeaveOut):
                self.member.note_exclusions(order)
            else:
                self.generations.obey(order)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """One attempt at the next step; a lost generation or a refused step ends the block without
        an error. Other exceptions pass through: the process ends, which is a failure like any.
        """
        if self.rehearsal.under_way:
            with self.rehearsal.step() as step:
                yield step
            return
        number = self.state.step + 1
        self.marks.begin(self.generation, number)
        self.blocks.training()
        self.marks.enter(progress_counters.DATA)
        step = Step(self, number, self.micro_batches(number))
        self.progress.begin(step)
        try:
            self.write(
                Kind.BATCH_TAKEN,
                step=number,
                rank=self.rank,
                samples=step.samples[: step.count] if self.arranged.leads(self.rank) else [],
                epoch=(number - 1) * self.config.global_batch // self.config.samples,
            )
            try:
                self.at(number, "data")
            except GenerationLost:
                pass  # the block cannot be skipped: its first phase() or its reduction raises again
            self.state.seed_step(self.arranged.draws(self.rank), number)
            self.state.attempt.begin()
            self.reducer.begin()
            with in_step(step.backward_mean if self.wrapped else None):
                yield step
            step.require_commit()
            if self.pausing and self.state.step < self.config.steps:
                self.generations.park("pause")
        except GenerationLost as error:
            self.generations.park(self.member.why_lost(), error=str(error))
        except NonFinite as error:
            self.caught(number, list(error.blamed), "loss or gradient")
            samples = samples_to_blame(self, step, error.blamed)
            self.generations.park("nonfinite", blamed=error.blamed, samples=samples)
        finally:
            self.progress.end()

    def _in_checkpoint(self, number: int, saves: bool) -> None:
        """This rank reaches a save; ``saves``: it takes part in writing the checkpoint."""
        if saves:
            self.marks.enter(progress_counters.CHECKPOINT)
        self.at(number, "checkpoint")

    def _lost_while_busy(self, error: GenerationLost) -> bool:
        if self.group is not None and not self.progress.inside:
            self.generations.park(self.member.why_lost(), error=str(error))
        return not (self.progress.inside or self.over)  # over: nothing is done again

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of this process, from its first generation on: ``replicate``, ``shard``,
        ``pipeline``, ``context`` and ``tensor``. Raises RuntimeError before.
        """
        if self._attached is None or self._attached.groups is None:
            raise RuntimeError(
                "job.mesh is there once job.running() has returned True, unless the script has"
                " called init_process_group"
            )
        return self._attached.groups.mesh

    @property
    def seed(self) -> int:
        """The job's seed: use it for everything that must be alike on all ranks, such as the
        model's initial values.
        """
        return self.config.seed

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.config.steps

    @property
    def device(self) -> str:
        """Where this process trains: ``cpu`` or ``cuda:<index>``."""
        return self.config.device

    @property
    def done(self) -> int:
        """The last step applied here."""
        return self.state.step
