"""The checkpoints of one rank: when to save, saving, and restoring the newest good one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trainchaos.chaos.errors import EXIT_FAIL, ChaosError
from trainchaos.recovery.checkpoint import own
from trainchaos.recovery.checkpoint import state_io as checkpointing
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Disk
from trainchaos.recovery.checkpoint.files.custody import Custody, writers
from trainchaos.recovery.checkpoint.files.saving import Saving, WriteRankEvent
from trainchaos.recovery.checkpoint.memory_checkpointer import MemoryCheckpointer
from trainchaos.recovery.checkpoint.save_writer import SaveWriter
from trainchaos.recovery.checkpoint.together import restore_together
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.policy.doubts import Doubt, in_doubt
from trainchaos.recovery.policy.interval import Rewinds, SaveSchedules, Wanted, schedules
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import quiet


class NothingToRestore(ChaosError):
    """Checkpoints exist, but none of them may be used."""

    exit_code = EXIT_FAIL


class Checkpointer:
    """Used by the training thread.

    ``check`` raises GenerationLost once the generation is aborted; ``progress``: called while a
    save or restore goes on, so that it is not taken for a hang; ``entered``: called with the step
    and whether this rank writes, when a save begins; ``saves``: called before anything is done for
    a save, in memory or on disk; ``agreed``: the last step at which the replicas are known to have
    been the same (-1: not known).

    A save that falls due while another is still being written is made as soon as that one is done.
    One at a pause is waited for, whatever the mode: the supervisor asks for it because a machine is
    about to go.
    """

    def __init__(
        self,
        config: JobConfig,
        state: TrainState,
        *,
        write: WriteRankEvent,
        send: Callable[[Any], object],
        check: Callable[[], None],
        progress: Callable[[], None],
        entered: Callable[[int, bool], None],
        saves: Callable[[], object] = quiet,
        agreed: Callable[[], int] = lambda: -1,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._state = state
        self._write = write
        self._progress = progress
        self._entered = entered
        self._saves = saves
        self._clock_s = clock_s
        self._saving = Saving(write=write, send=send, clock_s=clock_s)
        self._schedules = _schedules(config, clock_s())
        self._custody = Custody(
            config.checkpoint_dir,
            job=config.job_id,
            fresh=config.fresh,
            saving=self._saving,
            write=write,
            send=send,
            forget=self._forget,
        )
        self._fence = self._custody.fence
        self._writer = SaveWriter(
            config,
            state,
            saving=self._saving,
            timetable=self._schedules.disk,
            fence=self._fence,
            check=check,
            progress=progress,
            agreed=agreed,
            clock_s=clock_s,
        )
        self._memory: MemoryCheckpointer | None = None
        if config.memory is not None and self._schedules.memory is not None:
            self._memory = MemoryCheckpointer(
                config.memory,
                state,
                timetable=self._schedules.memory,
                clock_s=clock_s,
                seat=config.process,
                device=config.device,
                write=write,
                send=send,
                check=check,
                progress=progress,
                saves=saves,
            )

    @property
    def disk(self) -> Disk | None:
        """Replaces the disk's answers, for a fault injector."""
        return self._writer.disk

    @disk.setter
    def disk(self, disk: Disk | None) -> None:
        self._writer.disk = disk

    def wants(self, step: int) -> Wanted:
        """What rank 0 asks all ranks to save after ``step``: they learn it with the gradients."""
        return self._schedules.wants(step, self._clock_s(), busy=self._writer.background.busy)

    def keeps(self, asked: Wanted) -> bool:
        """Whether anything is saved of what is ``asked`` for."""
        disk = asked.disk and self._config.checkpoint_dir is not None
        return disk or (asked.memory and self._memory is not None)

    def after_commit(
        self,
        step: int,
        *,
        rank: int,
        layout: Layout,
        generation: int,
        asked: Wanted,
        pausing: bool = False,
    ) -> None:
        """Save if ``asked`` for, by ``wants`` or the supervisor; ``pausing``: training stops after
        this step. A failed save is reported and never ends training.
        """
        self._writer.report()
        if self._memory is not None:
            self._memory.after_commit(
                step, rank=rank, layout=layout, generation=generation, asked=asked.memory
            )
        self._schedules.asked(self._clock_s(), asked)
        directory = self._config.checkpoint_dir
        if directory is None or not asked.disk:
            return
        among = self._writers(layout)
        if rank not in among:
            self._entered(step, False)
            return
        self._saves()
        if self._writer.background.busy:
            self._writer.settle()
        if rank == 0:
            self._put_aside()  # the disk may accept it now
        began_s = self._saving.begin(step, whole=rank == 0)
        self._entered(step, True)
        self._writer.save(
            directory,
            generation=generation,
            rank=rank,
            writers=len(among),
            began_s=began_s,
            later=self._config.saves.mode == "async" and not pausing,
        )

    def parked(self, *, lost: bool) -> None:
        """This rank leaves its generation: nothing that it saves gets its final name from now on; a
        save that has it already is reported here. A save that it writes alone goes on and waits:
        all ranks committed its step, and this may be the rank that saves in the next generation
        too. ``lost``: the generation is lost, and with it what other ranks write.
        """
        if self._fence is not None:
            self._fence.suspend()
        self._writer.parked()
        if lost:
            self.lost()

    def lost(self) -> None:
        """The generation is lost: a save by several ranks is given up."""
        self._schedules.lost()
        self._writer.lost()

    def told(self, rewinds: Rewinds) -> None:
        """By which failures the supervisor has checkpoints spaced."""
        self._schedules.told(self._clock_s(), rewinds)

    def joined(self, rank: int, layout: Layout, generation: int) -> None:
        """A new generation: its rank 0 saves now, and no rank of an earlier one. What those have
        left of saves by several ranks must not be mixed with its own. Raises Fenced where a newer
        writer saves.
        """
        directory, fence = self._config.checkpoint_dir, self._fence
        self._state.room_for_own = partial(own.fit, layout=layout, rank=rank)
        self._writer.joined()
        self._custody.joined(rank, generation)
        if directory is None or fence is None:
            return
        if rank == 0 and len(self._writers(layout)) > 1:
            until = (fence.epoch, generation) if fence.epoch is not None else None
            checkpoints.sweep(directory, until=until, progress=self._progress)

    def began(self, step: int) -> None:
        """The generation trains on from this step."""
        self._writer.since = step

    def distrust(self, doubts: Sequence[Doubt], *, deletes: bool) -> None:
        """Restore none of the doubtful checkpoints: the state may have been corrupted before the
        corruption was noticed. ``deletes``: this rank sets them aside, and reports to the
        supervisor when they are. What fails now is tried again at each save, and by the next
        generation.
        """
        if doubts:
            self._writer.settle()
        self._custody.distrust(doubts, deletes=deletes)
        self._put_aside()

    def _put_aside(self) -> None:
        self._custody.put_aside(
            disk=self._writer.on_disk, guard=self._writer.guard, progress=self._progress
        )

    def _forget(self, doubts: Sequence[Doubt]) -> bool:
        memory = self._memory
        return memory is None or all([memory.distrust(step, before) for before, step in doubts])

    def require(self, *, anew: bool, fresh: bool) -> None:
        """Nothing was restored: check whether initial values may be used. ``anew``: the supervisor
        knows that no checkpoint was ever saved; ``fresh``: this process still holds the initial
        values. A job that was to begin with them does that once: what it has saved since counts.
        Raises NothingToRestore.
        """
        directory = self._config.checkpoint_dir
        where = f" in {directory}" if directory is not None else ""
        error = self._custody.nothing_left(anew=anew, fresh=fresh, where=where)
        if error is not None:
            hint = "start the job anew with --fresh, or put a checkpoint back that you trust"
            raise NothingToRestore(error, hint=hint)

    def restore(self, group: Group, layout: Layout) -> str | None:
        """Load the newest good checkpoint; its name, or None when none verifies. All end with the
        same checkpoint.

        With one shard it is called by rank 0. With several every rank of the group takes part, and
        those of the first replica load: see ``recovery.checkpoint.together``. Raises what
        ``restore_newest`` does.
        """
        self._writer.settle()
        self._custody.restoring()
        name = self._restore(group, layout)
        self._schedules.restored(self._clock_s())
        if name is None:
            self._state.own = {}
        return name

    def _restore(self, group: Group, layout: Layout) -> str | None:
        """Restore from memory or disk, whichever is newer; memory where both have the same step."""
        for candidate in self._memory.newest(group, layout) if self._memory is not None else ():
            if in_doubt(
                self._custody.choosing.doubts, generation=candidate.moment[0], step=candidate.step
            ):
                continue
            newer = self._from_disk(group, layout, newer_than=candidate.moment)
            if newer is not None:
                return newer
            if self._memory is not None and self._memory.restore(candidate, group, layout):
                return candidate.name
        return self._from_disk(group, layout, newer_than=None)

    def _from_disk(
        self, group: Group, layout: Layout, *, newer_than: tuple[int, int] | None
    ) -> str | None:
        directory, wanted = (
            self._config.checkpoint_dir,
            partial(self._custody.choosing.wanted, newer_than),
        )
        if directory is None:
            return None
        if layout.shards > 1:
            found = restore_together(
                self._state,
                directory,
                group,
                layout,
                self._custody.refused,
                progress=self._progress,
                device=self._config.device,
                wanted=wanted,
            )
        else:
            found = checkpointing.restore_newest(
                self._state,
                directory,
                self._custody.refused,
                progress=self._progress,
                wanted=wanted,
            )
        return found.name if found else None

    def close(self) -> None:
        """Finish what is under way, within END_S. A save that waits for its name, because this rank
        has left its generation, is given up.
        """
        if self._fence is not None and self._fence.suspended:
            self._fence.give_up()
        self._writer.settle()
        if self._memory is not None:
            self._memory.close()

    def _writers(self, layout: Layout) -> range:
        return writers(layout, sharded=self._config.saves.sharded)


def _schedules(config: JobConfig, now_s: float) -> SaveSchedules:
    return schedules(
        disk=config.checkpoint_every if config.checkpoint_dir is not None else 0,
        memory=config.memory.every if config.memory is not None else 0,
        mtbf_s=config.saves.mtbf_s,
        now_s=now_s,
    )
