"""The checkpoints of one rank: when to save, saving, and restoring the newest good one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from trainchaos.chaos.errors import EXIT_FAIL, ChaosError
from trainchaos.recovery.checkpoint import own
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import FREE, Checkpoint, Disk
from trainchaos.recovery.checkpoint.files.custody import Custody, writers
from trainchaos.recovery.checkpoint.files.saving import RankHooks, Saving
from trainchaos.recovery.checkpoint.memory_checkpointer import SETTLE_S, MemoryCheckpointer
from trainchaos.recovery.checkpoint.restore import (
    Candidate,
    ChunkRestore,
    prepared,
    restore_first,
)
from trainchaos.recovery.checkpoint.save_writer import SaveWriter
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.policy.doubts import Doubt, in_doubt
from trainchaos.recovery.policy.interval import Rewinds, Wanted, schedules
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState


class NothingToRestore(ChaosError):
    """Checkpoints exist, but none of them may be used."""

    exit_code = EXIT_FAIL


class Checkpointer:
    """Used by the training thread. ``disk``: replaces the disk's answers, for a fault injector.

    A save that falls due while another is still being written is made as soon as that one is done.
    One at a pause is waited for, whatever the mode: the supervisor asks for it because a machine is
    about to go.
    """

    def __init__(self, config: JobConfig, state: TrainState, hooks: RankHooks) -> None:
        self.disk: Disk | None = None
        self._config = config
        self._state = state
        self._hooks = hooks
        self._schedules = schedules(
            disk=config.checkpoint_every if config.checkpoint_dir is not None else 0,
            memory=config.memory.every if config.memory is not None else 0,
            mtbf_s=config.saves.mtbf_s,
            now_s=hooks.clock_s(),
        )
        saving = Saving(write=hooks.write, send=hooks.send, clock_s=hooks.clock_s)
        self._custody = Custody(
            config.checkpoint_dir,
            job=config.job_id,
            fresh=config.fresh,
            saving=saving,
            write=hooks.write,
            send=hooks.send,
            forget=self._forget,
        )
        fence, timetables = self._custody.fence, self._schedules
        self._writer: SaveWriter | None = None
        if fence is not None:
            disk, timetable = self._disturb, timetables.disk
            self._writer = SaveWriter(config, state, hooks, saving, fence, disk, timetable)
        self._memory: MemoryCheckpointer | None = None
        if config.memory is not None and timetables.memory is not None:
            self._memory = MemoryCheckpointer(
                config.memory, state, hooks, seat=config.process, timetable=timetables.memory
            )

    def _disturb(self, what: str, path: Path) -> None:
        if self.disk is not None:
            self.disk(what, path)

    def wants(self, step: int) -> Wanted:
        """What rank 0 asks all ranks to save after ``step``: they learn it with the gradients."""
        busy = self._writer is not None and self._writer.background.busy
        return self._schedules.wants(step, self._hooks.clock_s(), busy=busy)

    def keeps(self, asked: Wanted) -> bool:
        """Whether anything is saved of what is ``asked`` for."""
        disk = asked.disk and self._writer is not None
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
        writer = self._writer
        if writer is not None:
            writer.report()
        if self._memory is not None:
            self._memory.after_commit(
                step, rank=rank, layout=layout, generation=generation, asked=asked.memory
            )
        self._schedules.asked(self._hooks.clock_s(), asked)
        if writer is None or not asked.disk:
            return
        among = self._writers(layout)
        if rank not in among:
            self._hooks.entered(step, False)
            return
        self._hooks.saves()
        if writer.background.busy:
            writer.settle()
        if rank == 0:
            self._put_aside()  # the disk may accept it now
        self._hooks.entered(step, True)
        later = self._config.saves.mode == "async" and not pausing
        writer.save(step, generation=generation, rank=rank, writers=len(among), later=later)

    def parked(self, *, lost: bool) -> None:
        """This rank leaves its generation: nothing that it saves gets its final name from now on; a
        save that has it already is reported here. A save that it writes alone goes on and waits:
        all ranks committed its step, and this may be the rank that saves in the next generation
        too. ``lost``: the generation is lost, and with it what other ranks write.
        """
        if self._writer is not None:
            self._writer.parked()
        if lost:
            self.lost()

    def lost(self) -> None:
        """The generation is lost: a save by several ranks is given up."""
        self._schedules.lost()
        if self._writer is not None:
            self._writer.lost()

    def told(self, rewinds: Rewinds) -> None:
        """By which failures the supervisor has checkpoints spaced."""
        self._schedules.told(self._hooks.clock_s(), rewinds)

    def joined(self, rank: int, layout: Layout, generation: int) -> None:
        """A new generation: its rank 0 saves now, and no rank of an earlier one. What those have
        left of saves by several ranks must not be mixed with its own. Raises Fenced where a newer
        writer saves.
        """
        self._state.room_for_own = partial(own.fit, layout=layout, rank=rank)
        if self._writer is not None:
            self._writer.joined()
        self._custody.joined(rank, generation)
        fence, directory = self._custody.fence, self._config.checkpoint_dir
        if rank == 0 and fence and directory and len(self._writers(layout)) > 1:
            until = (fence.epoch, generation) if fence.epoch is not None else None
            checkpoints.sweep(directory, until=until, progress=self._hooks.progress)

    def began(self, step: int) -> None:
        """The generation trains on from this step."""
        if self._writer is not None:
            self._writer.since = step

    def distrust(self, doubts: Sequence[Doubt], *, deletes: bool) -> None:
        """Restore none of the doubtful checkpoints: the state may have been corrupted before the
        corruption was noticed. ``deletes``: this rank sets them aside, and reports to the
        supervisor when they are. What fails now is tried again at each save, and by the next
        generation.
        """
        if doubts and self._writer is not None:
            self._writer.settle()
        self._custody.distrust(doubts, deletes=deletes)
        self._put_aside()

    def _put_aside(self) -> None:
        self._custody.put_aside(self._writer.hand if self._writer is not None else FREE)

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
        those of the first replica load. Raises what ``restore_first`` does.
        """
        if self._writer is not None:
            self._writer.settle()
        if self._memory is not None:
            self._memory.settle(SETTLE_S)
        self._custody.restoring()
        together = layout.shards > 1
        found = restore_first(
            self._state,
            self._candidates() if not together or group.rank == 0 else (),
            lambda candidate: self._prepare(candidate, layout, group.rank if together else 0),
            self._refused,
            group=group if together else None,
            layout=layout,
            device=self._config.device,
        )
        self._schedules.restored(self._hooks.clock_s())
        if found is None:
            self._state.own = {}
            return None
        if not found.shards and (not together or group.rank == 0):
            checkpoints.note_verified(self._on_disk(found))
        return found.name

    def _candidates(self) -> list[Candidate]:
        """What may be restored, from memory or disk, whichever is newer; memory where both have the
        same step.
        """
        directory, choosing = self._config.checkpoint_dir, self._custody.choosing
        disk = checkpoints.newest_first(directory) if directory is not None else []
        found = list[Candidate]()

        def add_from_disk(newer_than: tuple[int, int] | None) -> None:
            wanted = [one for one in disk if choosing.wanted(newer_than, one)]
            found.extend(Candidate(step=one.step) for one in wanted)
            disk[:] = [one for one in disk if one not in wanted]

        for candidate in self._memory.candidates() if self._memory is not None else ():
            moment = candidate.generation, candidate.step
            if not in_doubt(choosing.doubts, generation=moment[0], step=moment[1]):
                add_from_disk(moment)
                found.append(candidate)
        add_from_disk(None)
        return found

    def _prepare(
        self, candidate: Candidate, layout: Layout, rank: int
    ) -> AbstractContextManager[ChunkRestore]:
        if candidate.shards and self._memory is not None:
            return self._memory.reading(candidate, layout, rank)
        return nullcontext(prepared(self._state, self._on_disk(candidate), self._hooks.progress))

    def _refused(self, candidate: Candidate, reason: str) -> None:
        if candidate.shards and self._memory is not None:
            self._memory.refused(candidate, reason)
        else:
            self._custody.refused(self._on_disk(candidate), reason)

    def _on_disk(self, candidate: Candidate) -> Checkpoint:
        assert self._config.checkpoint_dir is not None
        path = self._config.checkpoint_dir / checkpoints.name_of(candidate.step)
        return Checkpoint(path=path, step=candidate.step)

    def close(self) -> None:
        """Finish what is under way, within END_S. A save that waits for its name, because this rank
        has left its generation, is given up.
        """
        if self._writer is not None:
            self._writer.close()
        if self._memory is not None:
            self._memory.close()

    def _writers(self, layout: Layout) -> range:
        return writers(layout, sharded=self._config.saves.sharded)
