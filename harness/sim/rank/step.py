"""One attempt of a simulated rank at one step, as ``recovery.rank.step``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.sim.rank.faults import TrainingError
from trainchaos.harness.sim.rank.state import (
    Reduced,
    ReduceInput,
    State,
    after_each_other,
    digest,
    learning_rate,
    uniform,
)
from trainchaos.harness.sim.rank.tensors import ELEMENTS, SimLoss, finite, huge, norm_above
from trainchaos.harness.sim.world.clock import NS_PER_S
from trainchaos.harness.sim.world.group import rings_of
from trainchaos.harness.sim.world.settings import MS
from trainchaos.recovery.data import order
from trainchaos.recovery.data.order import MicroBatch
from trainchaos.recovery.policy.interval import Wanted, compared, counts
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.wire import MOST_BLAMED, Digest

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

Sleeping = Generator[float | None, Any, None]
COPY_SHARE = 0.1  # share of a save that training waits for: the copy in memory
PARTS_LOOK_MS = 5  # between checks for the parts of a save
# of a save
OPERATIONS = ("mkdir", "write", "write", "fsync", "write", "fsync", "fsync", "rename", "fsync")


class NonFinite(Exception):
    """The reduced loss or gradient is not finite."""

    def __init__(self, blamed: tuple[int, ...]) -> None:
        super().__init__(f"non-finite values from ranks {list(blamed)}")
        self.blamed = blamed


class Attempt:
    """One attempt at a step. ``part``: this rank's input to the all-reduce, from backward on;
    ``change_loss``: set by a fault.
    """

    def __init__(self, job: SimRank) -> None:
        self.number = job.state.step + 1
        self.change_loss: Callable[[SimLoss], SimLoss] | None = None
        self.change_forward: list[tuple[str, Callable[[list[float]], list[float]]]] = []
        self.samples: list[int] = []
        self._usual_seed = int.from_bytes(
            digest("seed", job.state.seed, job.rank, self.number)[:4], "big"
        )
        self.seed = self._usual_seed  # of the step's random numbers
        self.part = ReduceInput(loss_sum=0.0, count=0, pause=False, gradient=b"", bad=False)
        self._job = job
        self._phase = "data"
        self._since_ns = job.process.clock.now_ns
        self._seconds: dict[str, float] = {}
        self._wire_bytes = 0
        self.own = job.state.own  # as the attempt began
        self.open = True  # it was neither applied nor put back

    def run(self) -> Sleeping:
        """The whole step. Raises SimGenerationLost and NonFinite."""
        job, number = self._job, self.number
        timings = job.config.timings
        job.mark.begin(job.generation, number)
        job.mark.enter(progress_counters.DATA)
        job.faults.idle_ns = 0.0
        micros = self._share()
        samples = self.samples = [
            sample for micro in micros for sample in micro.samples[: micro.count]
        ]
        epoch = (number - 1) * job.config.global_batch // job.config.samples
        job.write(Kind.BATCH_TAKEN, step=number, rank=job.rank, samples=samples, epoch=epoch)
        if job.faults.active:
            yield from job.faults.at(number, "data")
        yield job.about(timings.phase_ns("data"))
        yield from self._enter("forward")
        shards = (yield from self._gather()) if job.layout.shards > 1 else ()
        work = self._work()
        yield job.about(work * timings.phase_ns("forward"))
        yield from self._enter("backward")
        # The parameters as forward saw them, including faults at its start.
        job.state = replace(job.state, own=job.state.own.passed(self.samples))
        self.part = replace(self._compute(micros, shards), own=job.state.own)
        if job.faults.poisoned.intersection(self.samples):
            self.part = replace(self.part, loss_sum=float("nan"), bad=True)
        self._corrupt_forward()
        self._poison_loss()
        yield job.about(work * timings.phase_ns("backward") / 2)
        job.check()
        if job.faults.active:
            yield from job.faults.at(number, "backward")
        yield job.about(work * timings.phase_ns("backward") / 2)
        job.check()
        yield from self._enter("collective")
        reduced = yield from self._reduce()
        yield from self._enter("optimizer")
        if not job.behaviour.accepts(job, reduced):
            job.member.holding.pending = 0
            raise NonFinite(reduced.blamed)
        yield job.about(timings.phase_ns("optimizer"))
        yield from self._apply(reduced)

    def examined(self, blamed: tuple[int, ...]) -> Generator[float | None, Any, list[int]]:
        """Samples that are non-finite by themselves; see recovery.rank.examine."""
        job = self._job
        if job.config.nonfinite == "skip" and self.number != job.examine:
            return order.blamed_share(
                self.samples,
                rank=job.rank,
                blamed=blamed,
                world=job.world,
                alike=job.config.arranged.alike,
                most=MOST_BLAMED,
            )
        if job.rank not in blamed or self.number != job.examine:
            return []
        yield job.about(job.config.timings.step_ms * MS)
        if job.state.bad:
            return []
        return [sample for sample in self.samples if sample in job.faults.poisoned]

    def corrupted(self, surface: str, values: list[float]) -> None:
        """A fault changed tensor values; from here on the digests show it."""
        bad = not finite(values)
        if surface == "gradient":
            self.part = replace(
                self.part,
                gradient=digest(self.part.gradient, values),
                bad=self.part.bad or bad,
                huge=self.part.huge or huge(values),
                norm=self.part.norm + norm_above(values),
            )
            return
        state = self._job.state
        if surface == "parameter":
            parameters = digest(state.parameters, values)
            self._job.state = replace(state, parameters=parameters, bad=state.bad or bad)
        else:
            self._job.state = replace(
                state, optimizer=digest(state.optimizer, values), due=(*state.due, tuple(values))
            )

    def _compute(self, micros: Sequence[MicroBatch], shards: Sequence[State]) -> ReduceInput:
        """Forward and backward of each micro-batch."""
        job, done, parts = self._job, 0, []
        for micro in micros:
            word = job.behaviour.random_word(job, self.number, micro.number)
            if self.seed != self._usual_seed:
                word = digest(word, self.seed)
            samples = self.samples[done : done + micro.count]
            parts.append(job.state.part(samples, word, pause=False, others=shards))
            done += micro.count
        return after_each_other(parts)

    def _share(self) -> list[MicroBatch]:
        job, config = self._job, self._job.config
        alike = config.arranged.alike
        ids = order.without(job.behaviour.batch(job, self.number), self.number, job.skip)
        return order.micro_batches(
            ids,
            rank=job.rank,
            world=job.world,
            full=config.world,
            shrink=config.batch == "shrink",
            elastic=config.determinism == "elastic",
            alike=alike,
            counts=job.rank % alike == 0,
        )

    def _work(self) -> float:
        """How long this rank's share takes, as a multiple of the share in a full world."""
        config, follows = self._job.config, self._job.config.timings.follows_share
        usual = config.global_batch / config.world
        return 1 - follows + follows * len(self.samples) / usual if follows else 1.0

    def _enter(self, phase: str) -> Sleeping:
        """End one phase and begin the next."""
        job = self._job
        job.check()
        clock = job.process.clock
        yield from job.faults.stretched(self._phase, clock.now_ns - self._since_ns)
        if job.faults.active:
            job.faults.body.check()
        now = clock.now_ns
        self._seconds[self._phase] = (
            self._seconds.get(self._phase, 0.0) + (now - self._since_ns) / 1e9
        )
        self._phase, self._since_ns = phase, now
        job.mark.enter(progress_counters.PHASES.index(phase))
        if job.faults.active and phase != "backward":
            yield from job.faults.at(self.number, phase)

    def _corrupt_forward(self) -> None:
        """Apply faults to the values that pass through the model."""
        for surface, change in self.change_forward:
            source = digest(surface, self.part.gradient)
            values = [uniform(digest(source, index)) for index in range(ELEMENTS)]
            changed = change(values)
            if repr(changed) != repr(values):
                gradient = digest(self.part.gradient, changed)
                bad = self.part.bad or not finite(changed)
                loss = float("nan") if bad else self.part.loss_sum + 1e-6 * uniform(gradient)
                self.part = replace(self.part, gradient=gradient, bad=bad, loss_sum=loss)

    def _poison_loss(self) -> None:
        if self.change_loss is not None:
            loss = float(self.change_loss(SimLoss(self.part.loss_sum)))
            gradient = digest(self.part.gradient, repr(loss))
            self.part = replace(
                self.part, loss_sum=loss, gradient=gradient, bad=self.part.bad or not finite([loss])
            )

    def _reduce(self) -> Generator[float | None, Any, Reduced]:
        job = self._job
        if job.faults.body.active:
            yield from job.faults.body.before_collective()
        job.collectives += 1
        job.mark.collective(job.collectives)
        # A ring all-reduce sends each element 2 (n - 1) / n times; recovery.collectives.reduce
        # counts the same.
        self._wire_bytes = int(job.config.timings.wire_bytes * 2 * (job.world - 1) / job.world)
        yield from job.faults.paced(self._wire_bytes)
        assert job.group is not None
        heard, wants = job.member.heard, Wanted()
        if job.rank == 0:
            wants = job.checkpoints.schedules.wants(self.number, self._now_s)
        part = replace(
            self.part,
            pause=heard.pause_wanted,
            save=heard.save_wanted or wants.disk,
            save_memory=wants.memory,
        )
        takes_ns = job.config.timings.phase_ns("collective")
        combine = partial(job.behaviour.combine, job)
        job.check()
        rings = rings_of(job.layout)
        job.group.meet(job.rank, part, combine, takes_ns, self._wire_bytes, rings=rings)
        reduced: Reduced = yield None
        if job.layout.shards > 1:
            yield from self._agree()
        job.check()
        return reduced

    def _gather(self) -> Generator[float | None, Any, list[State]]:
        """The parameters of all shards, from the ranks of this replica."""
        job = self._job
        job.mark.enter(progress_counters.COLLECTIVE)
        states: dict[int, State] = yield from self._meet(job.state, job.replica)
        job.mark.enter(progress_counters.PHASES.index("forward"))
        return list(states.values())

    def _agree(self) -> Sleeping:
        """The last collective, which confirms to all ranks that all have their part of the
        gradients. It may end on some ranks only; the others then have gradients that they have not
        applied.
        """
        self._job.member.holding.pending = self.number
        yield from self._meet(None, ())

    def _meet(self, part: object, among: Iterable[int]) -> Generator[float | None, Any, Any]:
        """A small collective of these ranks: the parts by rank."""
        job = self._job
        job.check()
        job.collectives += 1
        job.mark.collective(job.collectives)
        assert job.group is not None
        takes_ns = job.config.timings.phase_ns("collective") / 4
        job.group.meet(job.rank, part, dict, takes_ns, among=among)
        result = yield None
        job.check()
        return result

    def commit(self, reduced: Reduced) -> bool:
        """Apply the reduced gradients, as ``recovery.rank.step.complete``; returns whether all
        ranks save at this step. For a rank that applies the step later, with the others' result,
        this is all that is done of it.
        """
        job, number = self._job, self.number
        self.open = False
        lr = job.behaviour.learning_rate(
            job, learning_rate(job.state.scheduler_step, job.config.steps)
        )
        job.commit(number, reduced, lr)
        job.write(
            Kind.STEP_COMMITTED,
            step=number,
            rank=job.rank,
            world=job.world,
            samples=reduced.samples,
            loss=reduced.loss,
            lr=lr,
            wire_bytes=self._wire_bytes,
            grad_norm=reduced.grad_norm,
            optimizer_step=job.state.optimizer_step,
            scheduler_step=job.state.scheduler_step,
            seconds={name: round(value, 6) for name, value in self._seconds.items()},
        )
        job.mark.commit(number)
        job.pausing = reduced.pause
        job.faults.committed(number)
        saving = counts(number, job.config.checkpoint_every, asked=reduced.save)
        if saving or number == job.config.steps:
            job.write(Kind.STATE_DIGEST, step=number, rank=job.rank, **job.state.digests())
        return saving

    def _apply(self, reduced: Reduced) -> Sleeping:
        job, number = self._job, self.number
        self._seconds[self._phase] = (job.process.clock.now_ns - self._since_ns) / 1e9
        saving = self.commit(reduced)
        if job.memory is not None:
            yield from job.memory.after_commit(number, asked=reduced.save_memory)
        asked = Wanted(disk=reduced.save, memory=reduced.save_memory)
        job.checkpoints.schedules.asked(self._now_s, asked)
        self._tell_digest(saving=saving)
        if not reduced.save:
            return
        if job.rank in job.checkpoints.ranks:
            yield from self._save()
        elif job.faults.active:
            yield from job.faults.at(number, "checkpoint")

    def _tell_digest(self, *, saving: bool) -> None:
        job = self._job
        due = compared(
            self.number, every=job.config.verify_every, steps=job.config.steps, saving=saving
        )
        if due and job.layout.replicas > 1:
            text = job.state.voted()
            job.digest = Digest(generation=job.generation, step=self.number, digest=text)
            job.send(job.digest)
            if job.feeds is not None:
                job.feeds.check(self.number)

    @property
    def _now_s(self) -> float:
        return self._job.process.clock.now_ns / 1e9

    def _save(self) -> Sleeping:
        """Write a small but real checkpoint: rank 0 writes it, for all shards. The other ranks that
        save write their parts; the checkpoint only uses that they succeeded.
        """
        job, number = self._job, self.number
        job.mark.enter(progress_counters.CHECKPOINT)
        if job.rank:
            yield from self._save_part()
            return
        since_s = job.checkpoints.begin(number)
        if job.faults.active:
            yield from job.faults.at(number, "checkpoint")
        parts = {0: job.checkpoints.part()}
        if len(job.checkpoints.ranks) > 1:
            parts |= yield from self._parts_of_others()
        # In async mode the rest of the save costs nothing here.
        held_up = COPY_SHARE if job.config.saves.mode == "async" else 1.0
        yield job.about(job.config.timings.checkpoint_ms * held_up * MS)
        yield from self._disk_takes()
        job.checkpoints.schedules.disk.saved(since_s, self._now_s - since_s)
        done = job.checkpoints.commit(number, parts, since_s)
        if not done and not job.behaviour.survives_failed_save(job):
            raise TrainingError(RuntimeError("a checkpoint could not be saved"))

    def _parts_of_others(self) -> Generator[float | None, Any, dict[int, Any]]:
        """Wait for the other writers' parts, with signs of life; those ranks meanwhile continue
        with the next step (``recovery.checkpoint.saves.gather``).
        """
        job = self._job
        assert job.group is not None
        others = [rank for rank in job.checkpoints.ranks if rank != job.rank]
        while (parts := job.group.take_parts(others)) is None:
            yield PARTS_LOOK_MS * MS
            job.mark.touch()
            job.check()
        return parts

    def _save_part(self) -> Sleeping:
        """Save on a rank that does not commit: write its part, and leave it for the rank
        that does.
        """
        job, number = self._job, self.number
        since_s = job.checkpoints.begin_part(number)
        if job.faults.active:
            yield from job.faults.at(number, "checkpoint")
        yield from self._disk_takes()
        assert job.group is not None
        job.group.leave_part(job.rank, job.checkpoints.write_part(number, since_s))

    def _disk_takes(self) -> Sleeping:
        """Wait for the time that a fault adds to the disk operations of a save."""
        job = self._job
        for operation in OPERATIONS if job.faults.disk.active else ():
            yield job.faults.disk.delay_s([operation]) * NS_PER_S
            job.mark.touch()  # a slow disk is not a hang
