"""One attempt at one training step: its phases, its reduction, and how it is applied; and what the
parts of a rank share (``JobContext``).

The last collective of a sharded step may complete on some ranks only. The other ranks lack only its
result, which they receive in the next generation, so that no shard is left a step behind.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.recovery.checkpoint import own
from trainchaos.recovery.checkpoint.checkpointer import Checkpointer
from trainchaos.recovery.collectives.dialing import Address
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lost import GenerationLost, lost_in
from trainchaos.recovery.collectives.reduce import Asks, Reduced, Reducer
from trainchaos.recovery.data import order
from trainchaos.recovery.data.order import MicroBatch
from trainchaos.recovery.policy.interval import Wanted, compared, counts
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.busy import LIMIT_S, Busy, BusyBlocks
from trainchaos.recovery.rank.membership import Membership
from trainchaos.recovery.spares.live import Live
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.state.finite import Amount, amount_of
from trainchaos.recovery.state.misuse import backward_as_torch_does
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import Digest

_PASSES = ("data", "forward", "backward")
OTHER_LOSS = 1e-3
"""Relative difference of two losses of the same samples and the same state beyond what sums in
another order make of them.
"""


class StepProbe(Protocol):
    """Notified of where training is; the interface of a fault injector. Every call is on the
    training thread.
    """

    @property
    def active(self) -> bool:
        """Whether it wants notifications other than ``committed``."""

    def at(self, step: int, phase: str) -> None:
        """The rank is in this phase of this step."""

    def ended(self, phase: str, seconds: float) -> None:
        """The phase took this long."""

    def committed(self, step: int) -> None:
        """The step is committed."""


class NonFinite(Exception):
    """A loss or gradient that must not be applied. ``blamed``: ranks whose own values were not
    finite.
    """

    def __init__(self, blamed: tuple[int, ...]) -> None:
        super().__init__(f"non-finite values from ranks {list(blamed)}")
        self.blamed = blamed


LossOf = Callable[[list[int]], Tensor]
"""The summed loss of these samples, computed as in training."""


class JobContext:
    """What the parts of a rank's job share. Used by the training thread.

    ``rank`` (-1 in a spare) and ``world`` may change from step to step; ``group``: of the
    generation that it trains in, None between two; ``examine``: the step at which a non-finite
    value is to be traced to samples; ``pausing``: all ranks park after this step. Hooks for a fault
    injector: ``probe``, ``dial`` (opens a connection to a process by another way) and ``spoil``
    (replaces the loss of some samples).
    """

    state: TrainState
    reducer: Reducer
    checkpoints: Checkpointer
    live: Live | None  # for live spares, where there are any

    def __init__(
        self, config: JobConfig, agent: RankAgent, page: MarkPage, writer: EventWriter
    ) -> None:
        self.config = config
        self.arranged = config.arranged
        self.agent = agent
        self.marks = page
        self.writer = writer
        self.probe: StepProbe | None = None
        self.dial: Callable[[str, Address], Address] | None = None
        self.spoil: Callable[[list[int], Tensor], Tensor] | None = None
        self.loss_of: LossOf | None = None
        self.clip_norm = 0.0
        self.examine = 0
        self.pausing = False
        self.rank, self.world = -1, 0
        self.layout = Layout(world=1)
        self.group: Group | None = None
        self.member = Membership(agent.heard, steps=config.steps)
        self.blocks = BusyBlocks(
            note=page.busy,
            write=self.write,
            rank=lambda: self.rank,
            wanted=lambda: self.member.lost,
            lost=self._lost_while_busy,
        )
        self.progress = StepInProgress(marks=page, blocks=self.blocks)

    def _lost_while_busy(self, error: GenerationLost) -> bool:
        """Whether the end of the generation ends the block of what the rank is busy with."""
        raise NotImplementedError

    @property
    def generation(self) -> int:
        """Number of the group of ranks that this one trains in, or did last; 0 before the first."""
        return self.member.generation

    @property
    def current(self) -> Step:
        """The step begun last."""
        return self.progress.current

    @property
    def fed_at(self) -> str:
        """Where this process is fed as a live spare ("": nowhere)."""
        return "" if self.live is None else self.live.address

    def check(self) -> None:
        """Raise GenerationLost if the supervisor aborted this generation."""
        if self.member.lost:
            raise GenerationLost("aborted by the supervisor")

    def due(self, number: int) -> list[int]:
        """The global batch of a step, without excluded samples."""
        return list(self._batch(number))

    def _batch(self, number: int) -> order.Batch:
        config, skip = self.config, self.state.skip
        return order.Batch(number, config.global_batch, config.samples, config.seed, skip)

    def micro_batches(self, number: int, rank: int | None = None) -> list[MicroBatch]:
        """The micro-batches of a step that a rank (default: this one) computes. Raises RuntimeError
        when none is left.
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
            alike=config.arranged.alike,
        )

    def write(self, kind: Kind, /, **data: Any) -> None:
        """Log an event of this rank."""
        self.marks.wrote(self.writer.write(kind, **data).seq)

    def caught(self, step: int, blamed: list[int], what: str) -> None:
        """Log values that are not finite."""
        self.write(Kind.NONFINITE_CAUGHT, step=step, rank=self.rank, blamed=blamed, what=what)

    def busy(self, what: str, *, limit_s: float = LIMIT_S) -> Busy:
        """Report other work than training, such as an evaluation, that other ranks may wait for:
        this rank is not taken for hung within ``limit_s`` seconds (an hour).

        Use ``with job.busy("evaluation"):`` around the work, or a call before it, which lasts until
        the next phase of a step. Its ``wanted`` says whether another rank has failed meanwhile and
        the job waits. The event log says what the work was and how long it took (``busy``,
        ``busy_ended``). Raises ValueError.
        """
        return self.blocks.begin(what, limit_s)

    def at(self, number: int, phase: str) -> None:
        """Training is in this phase of this step."""
        if self.probe is not None and self.probe.active:
            self.probe.at(number, phase)


class Step:
    """One attempt at one step. ``samples``: ids of this rank's share of the global batch.

    ``count``: how many of them count; 0 for a rank without a share, which computes a sample only to
    take part.
    """

    def __init__(self, job: JobContext, number: int, micros: Sequence[MicroBatch]) -> None:
        self.number = number
        self.count = sum(micro.count for micro in micros)
        self.samples = [sample for micro in micros for sample in micro.samples[: micro.count]]
        if not self.count:
            self.samples = micros[0].samples
        self._micros = micros
        self._place: int | None = None  # the one of ``batches`` being computed
        self._kept = 0
        self._accumulated: Amount = 0.0
        self._changed = False  # a fault has changed the loss
        self.change_loss: Callable[[Tensor], Tensor] | None = None
        self.loss: Amount | None = None  # known, and of this state and these samples
        self._job = job
        self._phase = "data"
        self._since = time.perf_counter()
        self._reduced: Reduced | None = None
        self.seconds: dict[str, float] = {}

    @property
    def in_data(self) -> bool:
        """Whether no other phase has begun yet."""
        return self._phase == "data"

    def check_pass(self) -> None:
        """Raise GenerationLost if the supervisor has aborted this generation and the step is not
        reduced yet: from then on it may be applied already.
        """
        if self._phase in _PASSES:
            self._job.check()

    def end_phase(self) -> None:
        """Record the duration of the last phase."""
        self.seconds[self._phase] = time.perf_counter() - self._since

    def phase(self, name: str) -> None:
        """Note that the next phase begins (data, forward, backward, collective, optimizer). A
        script need not call it: all but ``data`` are noticed by themselves.
        """
        job = self._job
        job.check()
        job.blocks.training()
        now = time.perf_counter()
        probe = job.probe
        if probe is not None and probe.active:
            probe.ended(self._phase, now - self._since)
            now_after = time.perf_counter()
        else:
            now_after = now
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now_after - self._since
        self._phase = name
        self._since = now_after
        job.marks.enter(progress_counters.PHASES.index(name))
        if probe is not None and probe.active and name != "backward":
            probe.at(self.number, name)

    def wait(self, begins: bool) -> None:
        """A collective in the midst of a phase begins or ends: its time is not counted to the
        phase.
        """
        now = time.perf_counter()
        if begins:
            self._waiting_since = now
            return
        took = now - self._waiting_since
        self._since += took
        self.seconds["collective"] = self.seconds.get("collective", 0.0) + took
        self._job.marks.enter(progress_counters.PHASES.index(self._phase))

    def batches(self) -> Iterator[list[int]]:
        """Sample ids of each of this rank's micro-batches in turn; each is followed by its
        ``backward``.

        There is one, ``samples``, unless the job is elastic and ranks are missing. Raises
        RuntimeError when a micro-batch is left without ``backward``, or they are taken a second
        time.
        """
        if self._place is not None:
            raise RuntimeError("step.batches() was called twice in one step")
        job = self._job
        for place, micro in enumerate(self._micros):
            if place:
                self.phase("data")
            self._place = place
            if job.config.determinism == "elastic":
                job.state.seed_step(micro.number, self.number)
            yield self._ids(place)
            if self._kept == place and self._reduced is None:
                raise RuntimeError("a micro-batch of step.batches() ended without step.backward()")

    def accumulate(self, loss: Tensor) -> None:
        """Back-propagate a part of the summed loss, where all of it at once takes too much memory;
        the last part goes to ``backward``. Gradients add up, and nothing is reduced yet.
        """
        if self._reduced is not None:
            raise RuntimeError("step.accumulate() comes before step.backward()")
        self._accumulated = self._accumulated + amount_of(loss)
        self.phase("backward")
        self._job.reducer.expect(last=False)
        backward_as_torch_does(loss)
        self.phase("forward")

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the summed loss of this rank's samples, or of a micro-batch of
        ``batches``; with the last one, reduce gradients over the ranks.

        Raises RuntimeError the second time: a step has one reduction; and where ``batches`` has to
        be used.
        """
        job = self._job
        if job.config.determinism == "elastic" and self._place is None:
            raise RuntimeError(
                "with determinism: elastic a rank may have several micro-batches in a step: "
                "for samples in step.batches(): step.backward(...) of each"
            )
        place = self._place or 0
        if self._reduced is not None or self._kept > place:
            raise RuntimeError("step.backward() was called twice in one step: sum the losses first")
        micro, last = self._micros[place], place + 1 == len(self._micros)
        loss = self._as_faults_have_it(loss, place)
        value, self._accumulated = amount_of(loss) + self._accumulated, 0.0
        self.phase("backward")
        job.reducer.expect()
        backward_as_torch_does(loss)
        if not last:
            job.reducer.keep(rank=job.rank, loss_sum=value, count=micro.count)
            self._kept += 1
            return
        self._reduce(value, micro.count)

    def backward_mean(self, loss: Tensor) -> None:
        """``backward`` of a mean over this rank's samples, or over a micro-batch of ``batches``, as
        a loss is with DistributedDataParallel.
        """
        self.backward(loss * len(self._ids(self._place or 0)))

    def run(self, passes: Callable[[], Tensor]) -> None:
        """Have a pipeline's schedule make all forward and backward passes of the step, and reduce
        gradients over the ranks. ``passes`` returns the summed loss of the samples, where this rank
        knows it, else zero; it gives each loss that it back-propagates to ``as_loss`` first.

        Raises RuntimeError the second time: a step has one reduction.
        """
        if self._reduced is not None:
            raise RuntimeError("step.run() was called twice in one step")
        if len(self._micros) > 1:
            raise RuntimeError("step.run() is not for determinism: elastic")
        self.phase("forward")
        self._job.reducer.expect_several()
        try:
            loss = passes()
        except RuntimeError as error:  # torch's schedules raise their own
            lost = lost_in(error)
            if lost is None:
                raise
            raise lost from None
        if self.change_loss is not None:  # of a rank that has back-propagated none
            loss = self.as_loss(loss)
        self._reduce(amount_of(loss), self._micros[0].count)

    def as_loss(self, loss: Tensor) -> Tensor:
        """The loss of some of this rank's samples, as it is to be back-propagated."""
        return self._as_faults_have_it(loss, 0)

    def half_way(self) -> None:
        """The backward pass is in its middle; of several, the first one that gets there."""
        if self._phase == "forward":
            self.phase("backward")
        self._job.at(self.number, "backward")

    def _reduce(self, loss_sum: Amount, count: int) -> None:
        job = self._job
        if not self._changed:
            self.loss = loss_sum
            self._compare()
        self.phase("collective")
        wants = job.checkpoints.wants(self.number) if job.rank == 0 else Wanted()
        self._reduced = job.reducer.finish(
            rank=job.rank,
            loss_sum=loss_sum + job.state.attempt.spoilt(),
            count=count,
            asks=Asks(
                pause=job.member.heard.pause_wanted,
                save=job.member.heard.save_wanted or wants.disk,
                save_memory=wants.memory,
            ),
        )

    def _compare(self) -> None:
        """Say so if an attempt that was lost had another loss, though all that is known to change
        was put back.
        """
        lost = self._job.progress.lost
        if lost is None or lost.number != self.number or lost.samples != self.samples:
            return
        if lost.loss is None or self.loss is None:
            return
        first, again = float(lost.loss), float(self.loss)
        finite = math.isfinite(first) and math.isfinite(again)
        if finite and abs(again - first) > OTHER_LOSS * max(abs(first), abs(again)):
            print(
                f"step {self.number} was done again with the same state and samples, and its loss"
                f" is {again:.6g} in place of {first:.6g}: the pass depends on what is not"
                " registered, such as a random generator of its own (job.register)",
                file=sys.stderr,
                flush=True,
            )

    def _ids(self, place: int) -> list[int]:
        """Ids of one micro-batch. ``samples`` is consulted, since a fault may have changed it."""
        micro, done = self._micros[place], sum(micro.count for micro in self._micros[:place])
        return self.samples[done : done + micro.count] or micro.samples

    def _as_faults_have_it(self, loss: Tensor, place: int) -> Tensor:
        job, change, self.change_loss = self._job, self.change_loss, None
        self._changed = self._changed or bool(change or job.spoil)
        if change is not None:
            loss = change(loss)
        if job.spoil is not None:
            loss = job.spoil(self._ids(place), loss)
        return loss if self._micros[place].count else loss * 0.0

    def require_commit(self) -> None:
        """Raise RuntimeError unless this step is committed: the other ranks have moved on."""
        if self._job.state.step < self.number:
            raise RuntimeError(
                f"step {self.number} ended without step.commit(): every step needs it"
            )

    def commit(self) -> None:
        """Clip and apply the gradients, step the scheduler, and save a checkpoint if one is due.
        All ranks alike refuse a non-finite loss or gradient before it changes anything. Every block
        ends with it. Raises RuntimeError before ``backward``, and the second time.
        """
        if self._job.state.step >= self.number:
            raise RuntimeError(
                f"step {self.number} was committed already: step.commit() once in each step"
            )
        self.phase("optimizer")
        reduced = self._reduced
        if reduced is None:
            raise RuntimeError("commit() before backward()")
        if not reduced.finite:
            raise NonFinite(reduced.blamed)
        self._job.reducer.require()
        complete(self._job, self, reduced)


class StepInProgress:
    """The step that a rank is at, and the phases that its loop need not announce. ``current``: the
    step begun last; ``lost``: the attempt before it; ``inside``: the loop is in its block.
    """

    current: Step
    lost: Step | None = None

    def __init__(self, *, marks: MarkPage, blocks: BusyBlocks) -> None:
        self.inside = False
        self._thread = 0
        self._marks = marks
        self._blocks = blocks

    def begin(self, step: Step) -> None:
        """The loop enters this step's block."""
        self.lost = getattr(self, "current", None)
        self.current = step
        self.inside = True
        self._thread = threading.get_ident()

    def end(self) -> None:
        """The loop is out of the block, and the rank has parked if it had to."""
        self.inside = False

    def forget(self) -> None:
        """That step is none of the job's."""
        self.inside = False
        del self.current

    def forward(self, *_: object) -> None:
        """The model is called: the forward phase begins, if the loop has not announced it."""
        if torch.compiler.is_compiling():
            return  # must not become part of a compiled graph
        if self.inside and self.current.in_data and self._blocks.entered() is None:
            self.current.phase("forward")

    def passing(self, *_: object) -> None:
        """A part of the model is called. Raises GenerationLost where the rest of the pass would be
        thrown away.
        """
        if torch.compiler.is_compiling() or not self.inside:
            return
        if threading.get_ident() == self._thread and self._blocks.entered() is None:
            self.current.check_pass()

    def exchange(self, begins: bool) -> None:
        """A sharded model starts or stops waiting for the other ranks of its replica, in the midst
        of a pass.
        """
        if not self.inside:  # in code of the script's between two steps
            self._marks.enter(progress_counters.COLLECTIVE if begins else progress_counters.BETWEEN)
            return
        if begins:
            self._marks.enter(progress_counters.COLLECTIVE)
        self.current.wait(begins)

    def unfinished(self, done: int) -> int:
        """The step under way, 0 if it is applied already. ``done``: the last applied step."""
        return self.current.number if self.current.number > done else 0


def complete(job: JobContext, step: Step, reduced: Reduced, *, late: bool = False) -> None:
    """Apply the reduced gradients with the optimizer, and commit. ``late``: other ranks committed
    this step in an earlier generation and have gone on.
    """
    lr = _apply(job, step, reduced)
    if not late:
        step.end_phase()
    _log_commit(job, step, reduced, lr)
    if job.live is not None:  # after the log: what a spare holds is committed
        job.live.feeds.after(job.state, job.reducer, reduced.loss)
    job.marks.commit(step.number)
    job.pausing = reduced.asks.pause
    if job.probe is not None:
        job.probe.committed(step.number)
    config = job.config
    saving = counts(step.number, config.checkpoint_every, asked=reduced.asks.save)
    if saving or step.number == config.steps:
        digests = job.state.digests(job.marks.touch)
        job.write(Kind.STATE_DIGEST, step=step.number, rank=job.rank, **digests)
    if late:
        return
    _tell_digest(job, step.number, saving=saving)
    asked = Wanted(disk=reduced.asks.save, memory=reduced.asks.save_memory)
    with _with_own(job, asked):
        job.checkpoints.after_commit(
            step.number,
            rank=job.rank,
            layout=job.layout,
            generation=job.generation,
            asked=asked,
            pausing=reduced.asks.pause,
        )
    job.marks.enter(progress_counters.BETWEEN)


@contextmanager
def _with_own(job: JobContext, wanted: Wanted) -> Iterator[None]:
    """The state has, for a checkpoint, what the other ranks that hold the same part have of their
    own; see ``recovery.checkpoint.own``. Every rank calls it alike. Raises GenerationLost.
    """
    if job.group is not None and job.checkpoints.keeps(wanted):
        job.progress.exchange(True)
        try:
            holders = job.group.holders
            job.state.own = own.gathered(job.state, holders, job.layout, job.marks.touch)
        finally:
            job.progress.exchange(False)
    try:
        yield
    finally:
        job.state.own = {}


def _tell_digest(job: JobContext, step: int, *, saving: bool) -> None:
    """Send the supervisor a digest of the state after ``step``, if one is due and other ranks hold
    the same state. ``saving``: a checkpoint of this step is due.
    """
    due = compared(step, every=job.config.verify_every, steps=job.config.steps, saving=saving)
    if due and job.layout.replicas > 1:
        digest = Digest(
            generation=job.generation, step=step, digest=fingerprint(job.state, job.marks.touch)
        )
        if job.live is not None:
            job.live.feeds.check(step, digest.digest)
        job.agent.digest = digest
        job.agent.channel.send(digest)


def _apply(job: JobContext, step: Step, reduced: Reduced) -> float | None:
    """Apply the step; returns the learning rate it was done with, None: the optimizer has none."""
    state = job.state
    state.attempt.applied()
    job.member.holding.applied()
    lr = state.optimizer.param_groups[0].get("lr")
    if job.clip_norm:
        job.reducer.clip(reduced.grad_norm, job.clip_norm)
    if job.live is not None:
        job.live.feeds.before(state, job.reducer)
    state.apply(reduced.loss)
    state.step, state.last = step.number, figures_of(step.number, reduced)
    return None if lr is None else float(lr)


def _log_commit(job: JobContext, step: Step, reduced: Reduced, lr: float | None) -> None:
    job.write(
        Kind.STEP_COMMITTED,
        step=step.number,
        rank=job.rank,
        world=job.world,
        samples=reduced.samples,
        loss=reduced.loss,
        lr=lr,
        wire_bytes=job.reducer.wire_bytes,
        grad_norm=reduced.grad_norm,
        optimizer_step=job.state.optimizer_step(),
        scheduler_step=job.state.scheduler_step(),
        seconds={k: round(v, 6) for k, v in step.seconds.items()},
    )


def figures_of(step: int, reduced: Reduced) -> list[float]:
    """The figures kept of an applied step: number, loss, samples, gradient norm."""
    return [float(step), reduced.loss, float(reduced.samples), reduced.grad_norm]


def exchange_totals(step: int, last: list[float], group: Group, device: str) -> Reduced:
    """The totals that all ranks knew when ``step`` was applied; a collective of every rank of the
    group. ``last``: what this rank has noted. Raises GenerationLost, also when no rank knows.
    """
    known = last[1:] if last and last[0] == step else [-math.inf] * 3
    word = torch.tensor(known, dtype=torch.float64, device=device)
    everyone = group.everyone
    # MAX instead of a sum keeps the values the same to the last bit.
    everyone.wait(everyone.start_all_reduce(word, dist.ReduceOp.MAX))
    loss, samples, norm = everyone.read(word)
    if samples < 0:
        raise GenerationLost(f"nobody knows how step {step} ended")
    return Reduced(loss=loss, samples=round(samples), blamed=(), grad_norm=norm)
