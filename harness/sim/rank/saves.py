"""The checkpoints of one simulated rank, small but real. As for a real rank,
``recovery.checkpoint.files.custody`` and ``recovery.checkpoint.files.saving`` decide who writes,
what may be restored and what is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainchaos.harness.rank.shims.disk import RECORD_SUFFIX
from trainchaos.harness.sim.rank.faults import TrainingError
from trainchaos.harness.sim.rank.state import State
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint, Hand
from trainchaos.recovery.checkpoint.files.custody import Custody, agreement, writers
from trainchaos.recovery.checkpoint.files.fence import Fenced
from trainchaos.recovery.checkpoint.files.saving import Saving
from trainchaos.recovery.policy.doubts import Doubt
from trainchaos.recovery.policy.interval import schedules
from trainchaos.recovery.transport.atomic_rename import remove
from trainchaos.recovery.transport.wire import Join

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

DATA_FILE = "state.bin"
JOB = "simulated"


@dataclass(frozen=True, kw_only=True)
class WrittenPart:
    """A part that one rank has written, or why it could not."""

    state: State
    error: str = ""


class SimSaves:
    """``since``: the step from which this generation continued."""

    def __init__(self, job: SimRank) -> None:
        self.since = -1
        self._job = job
        directory, clock = job.config.checkpoint_dir, job.process.clock
        self._saving = Saving(write=job.write, send=job.send, clock_s=lambda: clock.now_ns / 1e9)
        self.schedules = schedules(
            disk=job.config.checkpoint_every,
            memory=job.config.memory_every,
            mtbf_s=job.config.saves.mtbf_s,
            now_s=clock.now_ns / 1e9,
        )
        self._custody = Custody(
            directory,
            job=JOB,
            fresh=False,
            saving=self._saving,
            write=job.write,
            send=job.send,
            forget=self._forget,
        )
        assert self._custody.fence is not None
        self._fence = self._custody.fence
        self._hand = Hand(disk=self._disk, guard=self._fence.held)
        self.choosing = self._custody.choosing

    @property
    def ranks(self) -> range:
        """The ranks that write a part of each checkpoint; rank 0 commits."""
        return writers(self._job.layout, sharded=self._job.config.saves.sharded)

    def joining(self, order: Join) -> None:
        """A new generation: rank 0 puts checkpoints aside that may hold a corrupted state. Raises
        TrainingError if a newer generation writes.
        """
        try:
            self._custody.joined(self._job.rank, self._job.generation)
        except Fenced as error:
            raise TrainingError(error) from error
        self._custody.distrust(order.resume.doubts, deletes=self._job.rank == 0)
        self._put_aside()
        if (rewinds := order.resume.rewinds) is not None:
            self.schedules.told(self._job.process.clock.now_ns / 1e9, rewinds)

    def _put_aside(self) -> None:
        self._custody.put_aside(self._hand)

    def _forget(self, doubts: Sequence[Doubt]) -> bool:
        memory = self._job.memory
        if memory is not None:
            for before, step in doubts:
                memory.distrust(step, before)
        return True

    def newest(self) -> tuple[Checkpoint, dict[str, Any]] | None:
        """The checkpoint to restore, with its manifest."""
        self._custody.restoring()
        return self._job.behaviour.restore(self._job, self._custody.refused)

    def restored(self) -> None:
        """Training continues from a checkpoint, or from the start."""
        self.schedules.restored(self._job.process.clock.now_ns / 1e9)

    def require(self, *, anew: bool) -> None:
        """Nothing was restored: check whether initial values are allowed. Raises RuntimeError."""
        error = self._custody.nothing_left(anew=anew, fresh=self._job.member.holding.fresh)
        if error is not None:
            raise RuntimeError(error)

    def begin(self, step: int) -> float:
        """A save begins; returns the time in seconds."""
        self._put_aside()  # the disk may accept it now
        return self._saving.begin(step)

    def begin_part(self, step: int) -> float:
        """This rank's part of a save begins; returns the time in seconds."""
        return self._saving.begin(step, whole=False)

    def part(self) -> WrittenPart:
        """This rank's part, as if it were written."""
        return WrittenPart(state=self._job.state)

    def write_part(self, step: int, since_s: float) -> WrittenPart:
        """Write the part that another rank commits, and report the result."""
        outcome = self._saving.attempt(step, self._try_part, since_s=since_s, whole=False)
        self._saving.report(outcome)
        return WrittenPart(state=self._job.state, error=outcome.error)

    def _try_part(self) -> None:
        job = self._job
        staging = job.config.checkpoint_dir / f".staging-{job.process.name}"
        staging.mkdir(parents=True, exist_ok=True)
        path, record = (
            staging / f"rank-{job.rank:04d}.bin",
            staging / f".part-{job.rank:04d}{RECORD_SUFFIX}",
        )
        try:
            self._fill(path, job.state.data())
            self._fill(record, b"{}")
            self._disk("rename", record)
        finally:
            remove(staging)

    def _fill(self, path: Path, data: bytes) -> None:
        with open(path, "wb") as stream:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                self._disk("write", path)
                stream.write(half)
                stream.flush()

    def commit(self, step: int, parts: Mapping[int, WrittenPart], since_s: float) -> bool:
        """Write it, and delete checkpoints beyond retention; False if it failed. ``parts``: of all
        ranks that save, by rank; if all ranks hold the same, rank 0's is the whole state.
        """
        config = self._job.config
        outcome = self._saving.attempt(step, partial(self._write, step, parts), since_s=since_s)
        self._saving.report(outcome)
        if outcome.bytes is None:
            return False
        agreed = agreement(
            self._job.member.heard.agreed,
            every=config.verify_every,
            world=config.world,
            shards=config.shards,
        )
        recorded = {checkpoints.name_of(step)}
        self._saving.prune(
            config.checkpoint_dir,
            config.checkpoint_keep,
            agreed=agreed,
            recorded=recorded,
            hand=self._hand,
        )
        return True

    def _write(self, step: int, parts: Mapping[int, WrittenPart]) -> tuple[Checkpoint, int]:
        job = self._job
        for rank, part in parts.items():
            if part.error:
                raise RuntimeError(f"writer {rank} gave up: {part.error}")
        states = [part.state for _, part in sorted(parts.items())][: job.layout.shards]
        if any(not state.finite for state in states):
            raise RuntimeError("the state is not finite, so it is not saved")
        directory = job.config.checkpoint_dir
        epoch = self._fence.enter(job.generation, takes=True)
        staging = directory / f".staging-{job.process.name}"
        checkpoints.sweep(directory)
        self._disk("mkdir", staging)
        staging.mkdir(parents=True)
        data, path = b"".join(state.data() for state in states), staging / DATA_FILE
        self._fill(path, data)
        origin = {"epoch": epoch, "generation": job.generation, "since": self.since, "job": JOB}
        facts = {**origin, "scalars": job.state.scalars()}
        return checkpoints.commit(staging, directory, step, facts, hand=self._hand)

    def _disk(self, what: str, path: Path) -> None:
        """Consult the simulated disk, and then this rank's faults."""
        for disk in (self._job.config.disk, self._job.faults.disk):
            if disk is not None:
                disk(what, path)
