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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.recovery.checkpoint.checkpointer import Checkpointer
from trainchaos.recovery.collectives import nccl
from trainchaos.recovery.collectives.dialing import Address
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.collectives.nccl import recorder
from trainchaos.recovery.collectives.reduce import Reducer
from trainchaos.recovery.data import order
from trainchaos.recovery.data.loader import LIMIT_S as LOADER_LIMIT_S
from trainchaos.recovery.data.loader import Loader
from trainchaos.recovery.data.plan import SamplePlan
from trainchaos.recovery.detection.flight_recorder import recalled
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.busy import LIMIT_S, Busy, BusyBlocks
from trainchaos.recovery.rank.examine import LossOf, samples_to_blame
from trainchaos.recovery.rank.generation import Generations, announce, tell_end
from trainchaos.recovery.rank.membership import Membership
from trainchaos.recovery.rank.promotion import fed_at, listen, live_of
from trainchaos.recovery.rank.recipe import (
    Attached,
    MakeOptimizer,
    ModelRecipe,
    Parallelize,
)
from trainchaos.recovery.rank.rehearsal import Rehearsal
from trainchaos.recovery.rank.step import NonFinite, Step, StepInProgress, StepProbe
from trainchaos.recovery.spares.live import Live
from trainchaos.recovery.state.misuse import guard_scaling, in_step
from trainchaos.recovery.state.registered import Generator, MakeScheduler, Scheduler, Stateful
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import Abort, LeaveOut, Stop

__all__ = ["Job", "JobConfig"]


class Job:
    """One rank's membership in a supervised training job. Use from the training thread only.

    ``rank`` (-1 in a spare) and ``world`` may change from step to step. Hooks for a fault injector:
    ``probe``, ``dial`` (opens a connection to a process by another way), ``spoil`` (replaces the
    loss of some samples) and ``on_attach``.
    """

    state: TrainState
    reducer: Reducer
    checkpoints: Checkpointer
    live: Live | None
    wrapped: bool  # the model came in DistributedDataParallel

    def __init__(
        self, config: JobConfig, agent: RankAgent, page: MarkPage, writer: EventWriter
    ) -> None:
        self.config = config
        self.agent = agent
        self.marks = page
        self.writer = writer
        self.probe: StepProbe | None = None
        self.dial: Callable[[str, Address], Address] | None = None
        self.spoil: Callable[[list[int], Tensor], Tensor] | None = None
        self.on_attach: Callable[[Job], None] | None = None
        self.loss_of: LossOf | None = None
        self.clip_norm = 0.0
        self.examine = 0  # the step at which a non-finite value is to be traced to samples
        self.pausing = False  # all ranks park after this step
        self.over = False
        self.last_work: Callable[[], object] | None = None
        self.rank, self.world = -1, 0
        self.layout = Layout(world=1)
        self.arranged = config.arranged
        self._plan = SamplePlan(config)
        self.member = Membership(agent.heard, steps=config.steps)
        self.blocks = BusyBlocks(
            note=page.busy,
            write=self.write,
            rank=lambda: self.rank,
            wanted=lambda: self.member.lost,
            lost=self._lost_while_busy,
        )
        self.progress = StepInProgress(marks=page, blocks=self.blocks)
        self.generations = Generations(self)
        self.rehearsal = Rehearsal(self)
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
        self.live = live_of(self)
        self.reducer.check = self.check
        self.reducer.reached = lambda: self.current.half_way()
        self.checkpoints = Checkpointer(
            self.config,
            self.state,
            write=self.write,
            send=self.agent.channel.send,
            check=self.check,
            progress=self.marks.touch,
            entered=self._in_checkpoint,
            agreed=lambda: self.agent.heard.agreed,
            saves=lambda: self.marks.enter(progress_counters.CHECKPOINT),
        )
        self.clip_norm = clip_norm
        self.loss_of = loss_of or self.loss_of
        guard_scaling()
        self._attached, self.wrapped = attached, attached.wrapped
        if self.on_attach is not None:
            self.on_attach(self)

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
        ImportError when torchdata is not installed, TypeError for an iterable dataset, RuntimeError
        before ``attach``.
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
        listen(self)
        back = self.config.backend
        self.agent.status = lambda n: self.member.status(self.state.step, n, fed_at(self))
        self.agent.recall = lambda n: recalled(n, back, self.generation, self.rank, recorder)
        self.agent.start()
        self._announced = True
        announce(self)

    def running(self) -> bool:
        """True when a step should be trained; waits for the supervisor where needed. False: end of
        the job.

        A spare waits here until it is needed. Raises RuntimeError before ``attach``.
        """
        attached = self._require_attached("running()")
        if not self._announced:
            if self.rehearsal.begins(attached):
                return True
            self.ready()
        while True:
            if self.member.trains(self.state.step):
                self.marks.enter(progress_counters.BETWEEN)
                return True
            if finished := self.member.finished(self.state.step):
                tell_end(self, finished)
            order = self.agent.orders.get()
            if isinstance(order, Stop):
                self.generations.end(attached)
                self.over = True
                return False
            if isinstance(order, Abort):
                if self.member.must_park(order):
                    self.generations.park("aborted")
            elif isinstance(order, LeaveOut):
                self.member.note_exclusions(order)
            else:
                self.generations.obey(order, attached)

    def caught(self, step: int, blamed: list[int], what: str) -> None:
        """Log values that are not finite."""
        self.write(Kind.NONFINITE_CAUGHT, step=step, rank=self.rank, blamed=blamed, what=what)

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
                self._at(number, "data")
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

    def _at(self, number: int, phase: str) -> None:
        if self.probe is not None and self.probe.active:
            self.probe.at(number, phase)

    def _in_checkpoint(self, number: int, saves: bool) -> None:
        """This rank reaches a save; ``saves``: it takes part in writing the checkpoint."""
        if saves:
            self.marks.enter(progress_counters.CHECKPOINT)
        self._at(number, "checkpoint")

    def busy(self, what: str, *, limit_s: float = LIMIT_S) -> Busy:
        """Report other work than training, such as an evaluation, that other ranks may wait for:
        this rank is not taken for hung within ``limit_s`` seconds (an hour).

        Use ``with job.busy("evaluation"):`` around the work, or a call before it, which lasts until
        the next phase of a step. Its ``wanted`` says whether another rank has failed meanwhile and
        the job waits. The event log says what the work was and how long it took (``busy``,
        ``busy_ended``). Raises ValueError.
        """
        return self.blocks.begin(what, limit_s)

    def _lost_while_busy(self, error: GenerationLost) -> bool:
        if self.generations.member and not self.progress.inside:
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
    def generation(self) -> int:
        """Number of the group of ranks that this one trains in, or did last; 0 before the first."""
        return self.member.generation

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

    @property
    def current(self) -> Step:
        """The step begun last."""
        return self.progress.current

    def check(self) -> None:
        """Raise GenerationLost if the supervisor aborted this generation."""
        if self.member.lost:
            raise GenerationLost("aborted by the supervisor")

    def due(self, number: int) -> list[int]:
        """The global batch of a step, without excluded samples."""
        return list(self._plan.batch(number, self.state.skip))

    def micro_batches(self, number: int, rank: int | None = None) -> list[order.MicroBatch]:
        """The micro-batches of a step that a rank (default: this one) computes. Raises RuntimeError
        when none is left.
        """
        asked = self.rank if rank is None else rank
        return self._plan.micro_batches(number, self.state.skip, rank=asked, world=self.world)

    def write(self, kind: Kind, /, **data: Any) -> None:
        """Log an event of this rank."""
        self.marks.wrote(self.writer.write(kind, **data).seq)
