"""The checkpoints of one simulated rank, small but real, as of ``recovery.mechanisms.checkpointer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.events import Kind
from harness.shims.disk import RECORD_SUFFIX
from harness.sim.state import State
from recovery import checkpoints
from recovery.checkpoints import Checkpoint
from recovery.choosing import Choosing
from recovery.fence import Fence
from recovery.renaming import remove
from recovery.retention import Agreement, aside_in
from recovery.saving import Saving
from recovery.wire import Join, SetAside, Unrecoverable

if TYPE_CHECKING:
    from harness.sim.rank import SimRank

DATA_FILE = "state.bin"
JOB = "simulated"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank has written, or why it could not."""

    state: State
    error: str = ""


class SimSaves:
    """``since``: the step from which this generation went on."""

    def __init__(self, job: SimRank) -> None:
        self.since = -1
        self._job = job
        self._refused: list[str] = []
        self._fence = Fence(job.config.checkpoint_dir, JOB)
        self.choosing = Choosing(job="", fresh=False, fence=self._fence)

    @property
    def ranks(self) -> range:
        """Who writes a part of each, as ``recovery.mechanisms.checkpointer`` has it; rank 0 commits."""
        job, shards = self._job, self._job.layout.shards
        return range(job.world if shards == 1 and job.config.checkpoint_sharded else shards)

    def joining(self, order: Join) -> None:
        """A new generation; what may hold a corrupted state is put out of the way by rank 0."""
        job = self._job
        if job.rank:
            self._fence.give_up()
        else:
            self._fence.take(job.generation)
        choosing, directory = self.choosing, job.config.checkpoint_dir
        choosing.doubts = tuple(order.doubts)
        if not order.doubts or job.rank:
            return
        if job.memory is not None:
            for before, step in order.doubts:
                job.memory.distrust(step, before)
        aside = partial(self._saving().set_aside, disk=self._disk, guard=self._fence.held)
        if aside(directory, choosing.in_doubt, choosing.why):
            job.send(SetAside(doubts=order.doubts))

    def newest(self) -> tuple[Checkpoint, dict[str, Any]] | None:
        """The one to restore, with its manifest."""
        self._refused = []
        return self._job.behaviour.restore(self._job, self._refuse)

    def require(self, *, anew: bool) -> None:
        """Nothing was restored: see whether initial values will do. Raises RuntimeError."""
        lost = [*self._refused, *aside_in(self._job.config.checkpoint_dir)]
        if anew and not lost:
            return
        what = f": {', '.join(lost)} may not be used" if lost else ""
        error = f"nothing is left to restore{what}"
        self._job.send(Unrecoverable(error=error))
        raise RuntimeError(error)

    def begin(self, step: int) -> tuple[Saving, float]:
        """A save begins, at this time in seconds."""
        saving = self._saving()
        return saving, saving.begin(step)

    def begin_part(self, step: int) -> float:
        """This rank's part of a save begins, at this time in seconds."""
        return self._saving().begin(step, whole=False)

    def part(self) -> Part:
        """What this rank holds, as if it were written."""
        return Part(state=self._job.state)

    def write_part(self, step: int, since_s: float) -> Part:
        """Write what another rank commits, and say how it went."""
        saving = self._saving()
        outcome = saving.tried(step, self._try_part, since_s=since_s)
        saving.report(outcome, whole=False)
        return Part(state=self._job.state, error=outcome.error)

    def _try_part(self) -> None:
        job = self._job
        staging = job.config.checkpoint_dir / f".staging-{job.process.name}"
        staging.mkdir(parents=True, exist_ok=True)
        path, record = staging / f"rank-{job.rank:04d}.bin", staging / f".part-{job.rank:04d}{RECORD_SUFFIX}"
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

    def commit(self, saving: Saving, step: int, parts: Mapping[int, Part], since_s: float) -> bool:
        """Write it, and delete what retention says; False: it failed. ``parts``: of all that save, by rank; where the
        ranks hold the same, that of rank 0 is the whole state."""
        config = self._job.config
        if not saving.attempt(step, partial(self._write, step, parts), since_s=since_s):
            return False
        compared = config.verify_every != 0 and config.world > config.shards
        agreed = (
            Agreement(step=self._job.member.heard.agreed, every=config.verify_every) if compared else None
        )
        recorded = {checkpoints.name_of(step)}
        saving.prune(
            config.checkpoint_dir, config.checkpoint_keep, agreed=agreed, recorded=recorded, disk=self._disk,
            guard=self._fence.held,
        )  # fmt: skip
        return True

    def _saving(self) -> Saving:
        job = self._job
        clock = job.process.clock
        return Saving(write=job.write, send=job.send, clock_s=lambda: clock.now_ns / 1e9)

    def _write(self, step: int, parts: Mapping[int, Part]) -> tuple[Checkpoint, int]:
        job = self._job
        for rank, part in parts.items():
            if part.error:
                raise RuntimeError(f"writer {rank} gave up: {part.error}")
        states = [part.state for _, part in sorted(parts.items())][: job.layout.shards]
        if any(state.bad for state in states):
            raise RuntimeError("the state is not finite, so it is not saved")
        directory = job.config.checkpoint_dir
        epoch = self._fence.enter(job.generation, takes=True)
        staging = directory / f".staging-{job.process.name}"
        checkpoints.sweep(directory)
        self._disk("mkdir", staging)
        staging.mkdir(parents=True)
        data, path = b"".join(state.data() for state in states), staging / DATA_FILE
        self._fill(path, data)
        origin = {"epoch": epoch, "generation": job.generation, "since": self.since}
        facts = {**origin, "scalars": job.state.scalars()}
        return checkpoints.commit(staging, directory, step, facts, disk=self._disk, guard=self._fence.held)

    def _refuse(self, bad: Checkpoint, reason: str) -> None:
        self._refused.append(bad.name)
        checkpoints.note_refused(bad, reason)
        self._job.write(Kind.CHECKPOINT_REFUSED, step=bad.step, checkpoint=bad.name, reason=reason)

    def _disk(self, what: str, path: Path) -> None:
        """The simulated disk's voice, and then a fault's in this rank."""
        for voice in (self._job.config.disk, self._job.faults.disk):
            if voice is not None:
                voice(what, path)
