"""What one rank may do with the checkpoints of its job: whether it writes them, which may be
restored, which are set aside, and what follows when none is left. No torch here, and no state of a
model.

Used by ``recovery.checkpoint.checkpointer`` and by simulated ranks (``harness.sim.rank.saves``),
each with its own way to bring a state to a disk and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint, Hand, Origin
from trainchaos.recovery.checkpoint.files.fence import CheckpointFence, Fenced
from trainchaos.recovery.checkpoint.files.retention import Agreement, aside_in
from trainchaos.recovery.checkpoint.files.saving import Saving, WriteRankEvent
from trainchaos.recovery.policy.doubts import Doubt, in_doubt
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.transport.wire import SetAside, Unrecoverable


class Custody:
    """Custody of one rank. ``directory``: None for no checkpoints; ``job``: its name, "" if it has
    none; ``fresh``: of ``CheckpointChooser``; ``send``: to the supervisor.

    ``forget``: releases doubtful checkpoints held in memory, and returns whether none is left
    there.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        job: str,
        fresh: bool,
        saving: Saving,
        write: WriteRankEvent,
        send: Callable[[Any], object],
        forget: Callable[[Sequence[Doubt]], bool] = lambda _: True,
    ) -> None:
        self.fence = CheckpointFence(directory, job) if directory is not None else None
        self.choosing = CheckpointChooser(job=job, fresh=fresh, fence=self.fence)
        self._directory = directory
        self._saving = saving
        self._write = write
        self._send = send
        self._forget = forget
        self._generation = 0  # the last generation that this rank joined
        self._unsettled = False  # this rank has not set aside everything in doubt yet
        self._bad: set[str] = set()  # on disk, and reported in this restore

    def joined(self, rank: int, generation: int) -> None:
        """A new generation: its rank 0 writes now, and no rank of an earlier one. Raises Fenced
        where a newer writer exists.
        """
        fence, follows = self.fence, generation == self._generation + 1
        self._generation = generation
        if fence is None:
            return
        if rank or not follows:
            # a save that waits for its name is not part of this generation's history
            fence.give_up()
        try:
            if rank == 0:
                fence.take(generation)
        except Fenced as error:
            self._send(Unrecoverable(error=error.message))
            raise
        except OSError:
            fence.give_up()  # a disk that accepts nothing now: the next save tries again

    def distrust(self, doubts: Sequence[Doubt], *, deletes: bool) -> None:
        """Restore none of the doubtful checkpoints from now on: the state may have been corrupted
        before the corruption was noticed. ``deletes``: this rank has to set them aside, by
        ``put_aside``.
        """
        self._unsettled = bool(doubts) and deletes
        if doubts:
            self.choosing.doubts = tuple(doubts)

    def put_aside(self, hand: Hand) -> None:
        """Set aside what is in doubt, and report to the supervisor when all of it is. What fails
        now is tried again at each save, and by the next generation.
        """
        if not self._unsettled:
            return
        choosing, directory = self.choosing, self._directory
        done = self._forget(choosing.doubts)
        if directory is not None:
            try:
                done &= self._saving.set_aside(directory, choosing.in_doubt, choosing.why, hand)
            except (Fenced, OSError):
                return  # a newer writer takes care of it, or it is tried again
        if done:
            self._unsettled = False
            self._send(SetAside(doubts=list(choosing.doubts)))

    def restoring(self) -> None:
        """A new restore begins: forget which checkpoints were refused."""
        self._bad = set()

    def refused(self, bad: Checkpoint, reason: str) -> None:
        """A checkpoint does not verify: reported once per restore, though it may be read twice, as
        one that is newer than several in memory.
        """
        if bad.name in self._bad:
            return
        self._bad.add(bad.name)
        checkpoints.note_refused(bad, reason)
        self._write(Kind.CHECKPOINT_REFUSED, step=bad.step, checkpoint=bad.name, reason=reason)

    def nothing_left(self, *, anew: bool, fresh: bool, where: str = "") -> str | None:
        """Nothing was restored. None: initial values may be used; else the reason why not, which is
        reported to the supervisor. ``anew``: the supervisor knows that no checkpoint was ever
        saved; ``fresh``: this process still holds the initial values. A job that was to begin with
        them does that once: what it has saved since counts.
        """
        lost = [*sorted(self._bad), *self.choosing.aside(self._directory)]
        if fresh and anew and not lost:
            return None
        what = f": {', '.join(lost)} may not be used" if lost else ""
        what += "" if fresh else "; this process no longer holds the initial state"
        error = f"nothing is left to restore{where}{what}"
        self._send(Unrecoverable(error=error))
        return error


def writers(layout: Layout, *, sharded: bool) -> range:
    """The ranks that write a part of a checkpoint: the first replica, or all where nothing is
    sharded and all share (``sharded``); rank 0 commits it.
    """
    return range(layout.world if layout.shards == 1 and sharded else layout.shards)


def agreement(step: int, *, every: int | None, world: int, shards: int) -> Agreement | None:
    """What retention knows of the comparison of replicas; None: they are not compared. ``step``:
    the last at which they were the same, ``every``: see Agreement, 0: never; ``world``: the full
    size.
    """
    return None if every == 0 or world == shards else Agreement(step=step, every=every)


class CheckpointChooser:
    """``job``: its name, "" if it has none; ``fresh``: it was to begin with initial values, so that
    earlier checkpoints never count; ``fence``: of its directory, None: it has none.

    ``doubts``: what may hold a corrupted state, whether it is set aside or not.
    """

    def __init__(self, *, job: str, fresh: bool, fence: CheckpointFence | None) -> None:
        self.doubts: tuple[Doubt, ...] = ()
        self._job = job
        self._fresh = fresh
        self._fence = fence

    def wanted(self, newer_than: tuple[int, int] | None, checkpoint: Checkpoint) -> bool:
        """Whether it may be restored: it is not in doubt, not of an earlier job where this one
        began anew, and newer than generation and step of one in memory.
        """
        origin = checkpoints.origin_of(checkpoint)
        if origin is None:  # verification will refuse and report it
            return not self._fresh and (newer_than is None or checkpoint.step > newer_than[1])
        mine = self._is_mine(origin)
        if (self._fresh and not mine) or self.in_doubt(checkpoint):
            return False
        if newer_than is None:
            return True
        if not self._job and self._epoch is None:
            return checkpoint.step > newer_than[1]  # its generation is unknown
        return mine and (origin.generation, checkpoint.step) > newer_than

    def in_doubt(self, checkpoint: Checkpoint) -> bool:
        """Whether it may hold a corrupted state. A checkpoint of an earlier job is older than any
        generation of this one.
        """
        origin = checkpoints.origin_of(checkpoint) or Origin()
        generation = origin.generation if self._is_mine(origin) else 0
        return in_doubt(self.doubts, generation=generation, step=checkpoint.step)

    def aside(self, directory: Path | None) -> list[str]:
        """Names of checkpoints that were set aside and could otherwise have been restored."""
        if directory is None:
            return []

        def mine(name: str) -> bool:
            origin = checkpoints.origin_of(Checkpoint(path=directory / name, step=0))
            return origin is not None and self._is_mine(origin)

        return [name for name in aside_in(directory) if not self._fresh or mine(name)]

    @property
    def why(self) -> str:
        """Why there is a doubt."""
        return (
            f"saved after step {min(step for _, step in self.doubts)}, at which the replicas last"
            " agreed"
        )

    @property
    def _epoch(self) -> int | None:
        return self._fence.epoch if self._fence is not None else None

    def _is_mine(self, origin: Origin) -> bool:
        """Whether this job saved it. The checkpoint's manifest says so even if the disk fails now;
        a job without a name goes by its epoch, and so do checkpoints from before names were
        recorded.
        """
        if self._job and origin.job:
            return origin.job == self._job
        return self._epoch == origin.epoch
