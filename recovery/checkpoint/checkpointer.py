"""The checkpoints of one rank: when to save, saving, and restoring the newest good one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from chaos.errors import EXIT_FAIL, ChaosError
from recovery.checkpoint import state_io as checkpointing
from recovery.checkpoint.files import checkpoints
from recovery.checkpoint.files.checkpoints import Disk
from recovery.checkpoint.files.custody import Custody, agreement, writers
from recovery.checkpoint.files.saving import Outcome, Saving, Write, pruned
from recovery.checkpoint.memory_checkpointer import Remembering
from recovery.checkpoint.saves.background import Background, Snapshot
from recovery.checkpoint.saves.chunks import Chunk
from recovery.checkpoint.saves.sharded import give_up
from recovery.checkpoint.state_io import Order
from recovery.checkpoint.together import restore_together
from recovery.collectives.group import GenerationLost, Group
from recovery.policy.doubts import Doubt, in_doubt
from recovery.policy.interval import Timetable
from recovery.policy.jobconfig import JobConfig
from recovery.policy.layout import Layout
from recovery.state.state import TrainState
from recovery.state.strides import quiet

PLACED_S = 0.5  # longest wait, before this rank parks, for a save that has its name
END_S = 60.0  # longest wait for a sign of life of a save that is under way


class NothingToRestore(ChaosError):
    """There were checkpoints, and none is left that may be used."""

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
        write: Write,
        send: Callable[[Any], object],
        check: Callable[[], None],
        progress: Callable[[], None],
        entered: Callable[[int, bool], None],
        saves: Callable[[], object] = quiet,
        agreed: Callable[[], int] = lambda: -1,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.disk: Disk | None = None  # a fault injector's voice in place of the disk's
        self._config = config
        self._state = state
        self._write = write
        self._check = check
        self._progress = progress
        self._entered = entered
        self._saves = saves
        self._agreed = agreed
        self._clock_s = clock_s
        self._saving = Saving(write=write, send=send, clock_s=clock_s)
        self._timetable = Timetable(
            config.checkpoint_every, mtbf_s=config.saves.mtbf_s, now_s=clock_s()
        )
        self._snapshot = Snapshot()
        self._background = Background()
        self._given_up = threading.Event()  # of the save under way
        self._written: set[str] = (
            set()
        )  # by this rank in this generation, so that nobody has to read them to know
        self._since = -1  # the step from which this generation went on
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
        self._placed = threading.Event()  # the save under way has its name
        self._memory: Remembering | None = None
        if config.memory is not None:
            self._memory = Remembering(
                config.memory,
                state,
                seat=config.process,
                device=config.device,
                write=write,
                send=send,
                check=check,
                progress=progress,
                saves=saves,
            )
        self._together = self._commits = False  # others write parts of it; this rank commits it

    def wants(self, step: int) -> bool:
        """Whether rank 0 asks all ranks to save after ``step``; it is told to them with the
        gradients.
        """
        if self._config.checkpoint_dir is None:
            return False
        return self._timetable.wants(step, self._clock_s(), busy=self._background.busy)

    def after_commit(
        self,
        step: int,
        *,
        rank: int,
        layout: Layout,
        generation: int,
        asked: bool,
        pausing: bool = False,
    ) -> None:
        """Save if ``asked`` for, by ``wants`` or the supervisor; ``pausing``: training stops after
        this step. A failed save is reported and never ends training.
        """
        self._report()
        if self._memory is not None:
            self._memory.after_commit(step, rank=rank, layout=layout, generation=generation)
        directory = self._config.checkpoint_dir
        if directory is None or not asked:
            return
        self._timetable.asked(self._clock_s())
        among = self._writers(layout)
        if rank not in among:
            self._entered(step, False)
            return
        self._saves()
        if self._background.busy:
            self._settle()
        if rank == 0:
            self._put_aside()  # the disk may take it now
        began_s = self._saving.begin(step, whole=rank == 0)
        self._entered(step, True)
        self._given_up, self._together, self._commits = threading.Event(), len(among) > 1, rank == 0
        self._placed = threading.Event()
        order, chunks = self._order(directory, generation, rank, len(among))
        if self._background.busy:
            self._not_saved(order, began_s, "the save before has not ended")
        elif self._config.saves.mode == "async" and not pausing:
            self._save_later(order, chunks, began_s)
        else:
            self._save_now(order, chunks, began_s)

    def parked(self, *, lost: bool) -> None:
        """This rank leaves its generation, and nothing that it saves gets its name from now on; one
        that has it already is said here. A save that it writes alone goes on and waits: what it
        writes was committed by all, and this may be the rank that saves in the next generation too.
        ``lost``: the generation is, and with it what others write.
        """
        if self._fence is not None:
            self._fence.suspend()
        if self._placed.is_set():
            self._background.wait(PLACED_S)
        self._report()
        if lost:
            self.lost()

    def lost(self) -> None:
        """The generation is lost: a save by several ranks is given up."""
        self._timetable.lost()
        if self._together:
            self._given_up.set()

    def joined(self, rank: int, layout: Layout, generation: int) -> None:
        """A new generation: its rank 0 is who saves now, and nobody of an earlier one. What those
        have left of saves by several ranks is not to be mixed with its own. Raises Fenced where
        somebody newer saves.
        """
        directory, fence = self._config.checkpoint_dir, self._fence
        self._written = set()
        self._custody.joined(rank, generation)
        if directory is None or fence is None:
            return
        if rank == 0 and len(self._writers(layout)) > 1:
            until = (fence.epoch, generation) if fence.epoch is not None else None
            checkpoints.sweep(directory, until=until, progress=self._progress)

    def began(self, step: int) -> None:
        """The generation trains on from this step."""
        self._since = step

    def distrust(self, doubts: Sequence[Doubt], *, deletes: bool) -> None:
        """Restore none of those: the state may have been corrupted before anybody noticed.
        ``deletes``: this rank puts them out of the way, and tells the supervisor when they are.
        What cannot be done now is tried again at each save, and by the next generation.
        """
        if doubts:
            self._settle()
        self._custody.distrust(doubts, deletes=deletes)
        self._put_aside()

    def _put_aside(self) -> None:
        self._custody.put_aside(disk=self._on_disk, guard=self._guard, progress=self._progress)

    def _forget(self, doubts: Sequence[Doubt]) -> bool:
        memory = self._memory
        return memory is None or all([memory.distrust(step, before) for before, step in doubts])

    def require(self, *, anew: bool, fresh: bool) -> None:
        """Nothing was restored: see whether initial values will do. ``anew``: the supervisor knows
        of no checkpoint that was ever saved; ``fresh``: this process still holds the initial
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
        self._settle()
        self._custody.restoring()
        name = self._restore(group, layout)
        self._timetable.restored(self._clock_s())
        return name

    def _restore(self, group: Group, layout: Layout) -> str | None:
        """From memory or disk, whichever has the newer one; memory where both have the same."""
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
        """Finish what is under way, within END_S. What waits for its name, as this rank has left
        its generation, is given up.
        """
        if self._fence is not None and self._fence.suspended:
            self._fence.give_up()
        self._settle()
        if self._memory is not None:
            self._memory.close()

    def _writers(self, layout: Layout) -> range:
        return writers(layout, sharded=self._config.saves.sharded)

    def _order(
        self, directory: Path, generation: int, rank: int, writers: int
    ) -> tuple[Order, list[Chunk]]:
        given_up, fence = self._given_up, self._fence
        assert fence is not None  # as there is a directory

        def check() -> None:
            if given_up.is_set():
                raise GenerationLost("the save was given up")

        return checkpointing.order_of(
            self._state,
            directory,
            generation=generation,
            writer=rank,
            writers=writers,
            job=self._config.job_id,
            delta_every=self._config.saves.delta,
            disk=self._on_disk,
            check=check,
            since=self._since,
            progress=self._progress,
            enter=partial(fence.enter, generation, takes=rank == 0),
            still=partial(fence.look, generation),
            guard=self._guard,
        )

    @contextmanager
    def _guard(
        self,
        *,
        waits: bool = False,
        check: Callable[[], None] | None = None,
        placed: threading.Event | None = None,
        tenure: int | None = None,
    ) -> Iterator[None]:
        assert self._fence is not None
        with self._fence.held(tenure=tenure, waits=waits, check=check):
            yield
            if placed is not None:
                placed.set()

    def _save_now(self, order: Order, chunks: Sequence[Chunk], began_s: float) -> None:
        given_up = order.check

        def check() -> None:
            self._check()
            given_up()
            self._progress()

        outcome = self._write_out(
            replace(order, check=check), chunks, began_s, None, (GenerationLost,)
        )
        self._timetable.saved(began_s, self._clock_s() - began_s)
        self._saving.report(outcome, whole=self._commits)

    def _save_later(self, order: Order, chunks: Sequence[Chunk], began_s: float) -> None:
        try:
            copies = self._snapshot.take(chunks, self._progress)
        except (OSError, MemoryError, RuntimeError) as error:
            self._not_saved(
                order, began_s, f"no copy of the state: {checkpoints.first_line(error)}"
            )
            return
        blocked_s = self._clock_s() - began_s
        self._timetable.saved(began_s, blocked_s)
        tenure = self._fence.tenure if self._fence is not None else None
        guard = partial(
            self._guard, waits=True, check=order.check, placed=self._placed, tenure=tenure
        )
        check, progress = self._background.seen_by(order.check), self._background.moved
        order = replace(
            order, disk=self._on_disk_later, progress=progress, check=check, guard=guard
        )
        self._background.start(lambda: self._write_out(order, copies, began_s, blocked_s, ()))

    def _not_saved(self, order: Order, began_s: float, why: str) -> None:
        """Said by who commits; the others tell that one."""
        if order.writer:
            give_up(checkpointing.note_of(order, order.writer), why)
        seconds = self._clock_s() - began_s
        outcome = Outcome(step=order.step, seconds=seconds, blocked_s=seconds, error=why)
        self._saving.report(outcome, whole=self._commits)

    def _write_out(
        self,
        order: Order,
        chunks: Sequence[Chunk],
        began_s: float,
        blocked_s: float | None,
        passes: tuple[type[BaseException], ...],
    ) -> Outcome:
        """On any thread. A writer that does not commit leaves its failure to the one that does to
        say.
        """
        save = partial(checkpointing.write, order, chunks)
        outcome = self._saving.tried(
            order.step, save, since_s=began_s, passes=passes, blocked_s=blocked_s
        )
        if outcome.saved is None:
            return outcome
        self._written.add(outcome.saved[0].name)
        config = self._config
        agreed = agreement(
            self._agreed(), every=config.verify_every, world=config.world, shards=config.shards
        )
        done = pruned(
            order.directory,
            config.checkpoint_keep,
            agreed=agreed,
            recorded=self._written,
            disk=order.disk,
            progress=order.progress,
            guard=self._guard,
        )
        return replace(outcome, pruned=done)

    def _settle(self) -> None:
        """Wait for the save under way, and give it up when it shows no sign of life for
        too long.
        """
        if not self._background.wait(END_S, self._progress):
            self._given_up.set()
        self._report()

    def _report(self) -> None:
        outcome = self._background.take()
        if outcome is not None:
            self._saving.report(outcome, whole=self._commits)

    def _on_disk(self, what: str, path: Path) -> None:
        self._progress()  # a slow disk is no hang
        self._on_disk_later(what, path)

    def _on_disk_later(self, what: str, path: Path) -> None:
        """Without a sign of progress of its own: this is not the training thread."""
        self._background.moved()
        if self.disk is not None:
            self.disk(what, path)
