"""The checkpoints of one rank: when to save, saving, and restoring the newest good one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from chaos.errors import EXIT_FAIL, ChaosError
from chaos.events import Kind
from recovery import checkpoints
from recovery.checkpoints import Checkpoint, Disk
from recovery.interval import History, parse
from recovery.jobconfig import JobConfig
from recovery.layout import Layout
from recovery.mechanisms import checkpoint as checkpointing
from recovery.mechanisms.checkpoint import Order
from recovery.mechanisms.group import GenerationLost, Group
from recovery.mechanisms.remembering import Remembering
from recovery.mechanisms.saving.background import Background, Snapshot
from recovery.mechanisms.saving.chunks import Chunk
from recovery.mechanisms.saving.together import restore_together
from recovery.mechanisms.state import TrainState
from recovery.retention import Agreement, aside_in
from recovery.saving import Outcome, Saving, Write, pruned
from recovery.wire import Unrecoverable

END_S = 60.0  # longest wait for a save that is under way, at the end and before a restore


class NothingToRestore(ChaosError):
    """There were checkpoints, and none is left that may be used."""

    exit_code = EXIT_FAIL


class Checkpointer:
    """Used by the training thread.

    ``check`` raises GenerationLost once the generation is aborted; ``progress``: called while a save or restore goes
    on, so that it is not taken for a hang; ``entered``: called with the step and whether this rank writes, when a
    save begins; ``agreed``: the last step at which the replicas are known to have been the same (-1: not known).

    A save that falls due while another is still being written is made as soon as that one is done. One at a pause is
    waited for, whatever the mode: the supervisor asks for it because a machine is about to go.
    """

    def __init__(
        self, config: JobConfig, state: TrainState, *, write: Write, send: Callable[[Any], object],
        check: Callable[[], None], progress: Callable[[], None], entered: Callable[[int, bool], None],
        agreed: Callable[[], int] = lambda: -1, clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.disk: Disk | None = None  # a fault injector's voice in place of the disk's
        self._config = config
        self._state = state
        self._write = write
        self._check = check
        self._progress = progress
        self._entered = entered
        self._agreed = agreed
        self._clock_s = clock_s
        self._send = send
        self._saving = Saving(write=write, send=send, clock_s=clock_s)
        every = config.checkpoint_every
        self._interval = parse(every, config.saves.mtbf_s) if every else None
        self._history = History(saved_s=clock_s(), since_s=clock_s())
        self._due = False
        self._snapshot = Snapshot()
        self._background = Background()
        self._given_up = threading.Event()  # of the save under way
        self._bad: set[str] = set()  # on disk, and said to be so in this restore
        self._written: set[str] = (
            set()
        )  # by this rank in this generation, so that nobody has to read them to know
        self._since = -1  # the step from which this generation went on
        self._doubted = (0, 0)  # generation and step, see distrust
        self._memory: Remembering | None = None
        if config.memory is not None:
            self._memory = Remembering(
                config.memory, state, seat=config.process, device=config.device, write=write, send=send,
                check=check, progress=progress,
            )  # fmt: skip
        self._together = self._commits = False  # others write parts of it; this rank commits it

    def wants(self, step: int) -> bool:
        """Whether rank 0 asks all ranks to save after ``step``; it is told to them with the gradients."""
        if self._config.checkpoint_dir is None or self._interval is None:
            return False
        self._due = self._due or self._interval.due(step, self._clock_s(), self._history)
        return self._due and not self._background.busy

    def after_commit(
        self, step: int, *, rank: int, layout: Layout, generation: int, asked: bool, pausing: bool = False
    ) -> None:
        """Save if ``asked`` for, by ``wants`` or the supervisor; ``pausing``: training stops after this step. A failed
        save is reported and never ends training.
        """
        self._report()
        if self._memory is not None:
            self._memory.after_commit(step, rank=rank, layout=layout, generation=generation)
        directory = self._config.checkpoint_dir
        if directory is None or not asked:
            return
        self._due = False
        began_s = self._clock_s()
        self._history = replace(self._history, saved_s=began_s)
        writers = self._writers(layout)
        if rank >= writers:
            self._entered(step, False)
            return
        if self._background.busy:
            self._settle()
        if rank == 0:
            began_s = self._saving.begin(step)
        self._entered(step, True)
        self._given_up, self._together, self._commits = threading.Event(), writers > 1, rank == 0
        order, chunks = self._order(directory, generation, rank, writers)
        if self._config.saves.mode == "async" and not pausing:
            self._save_later(order, chunks, began_s)
        else:
            self._save_now(order, chunks, began_s)

    def lost(self) -> None:
        """The generation is lost. A save by several ranks is given up; one that this rank writes alone goes on: what
        it writes was committed by all.
        """
        self._history = self._history.failed()
        if self._together:
            self._given_up.set()

    def joined(self, rank: int, layout: Layout) -> None:
        """A new generation: what earlier ones have left of saves by several ranks is not to be mixed with its own."""
        directory = self._config.checkpoint_dir
        self._written = set()
        if rank == 0 and directory is not None and self._writers(layout) > 1:
            checkpoints.sweep(directory)

    def began(self, step: int) -> None:
        """The generation trains on from this step."""
        self._since = step

    def distrust(self, step: int, *, before: int, deletes: bool) -> None:
        """Restore none that a generation before ``before`` saved after ``step``, unless that is negative: the state may
        have been corrupted before anybody noticed. ``deletes``: this rank puts those on the disk out of the way."""
        if step < 0:
            return
        self._settle()
        self._doubted = (before, step)
        if self._memory is not None and deletes:
            self._memory.distrust(step, before)
        directory = self._config.checkpoint_dir
        if directory is not None and deletes:
            self._saving.set_aside(directory, step, disk=self._on_disk)

    def require(self, *, anew: bool, fresh: bool) -> None:
        """Nothing was restored: see whether initial values will do. ``anew``: the supervisor knows of no checkpoint
        that was ever saved; ``fresh``: this process still holds the initial values. Raises NothingToRestore."""
        directory = self._config.checkpoint_dir
        aside = aside_in(directory) if directory is not None else []
        lost = [*sorted(self._bad), *aside]
        if fresh and (self._config.fresh or (anew and not lost)):
            return
        what = f": {', '.join(lost)} may not be used" if lost else ""
        what += "" if fresh else "; this process no longer holds the initial state"
        error = NothingToRestore(
            f"nothing is left to restore{f' in {directory}' if directory is not None else ''}{what}",
            hint="begin anew with --fresh, or put a checkpoint back that you trust",
        )
        self._send(Unrecoverable(error=error.message))
        raise error

    def restore(self, group: Group, layout: Layout) -> str | None:
        """Load the newest good checkpoint; its name, or None when none verifies. All end with the same checkpoint.

        With one shard it is called by rank 0. With several every rank of the group takes part, and those of the first
        replica load: see ``recovery.mechanisms.saving.together``. Raises what ``restore_newest`` does.
        """
        self._settle()
        self._bad = set()
        name = self._restore(group, layout)
        self._due, self._history = False, replace(self._history, saved_s=self._clock_s())
        return name

    def _restore(self, group: Group, layout: Layout) -> str | None:
        """From memory or disk, whichever has the newer one; memory where both have the same."""
        for candidate in self._memory.newest(group, layout) if self._memory is not None else ():
            if candidate.moment[0] < self._doubted[0] and candidate.step > self._doubted[1]:
                continue
            newer = self._from_disk(group, layout, newer_than=candidate.step)
            if newer is not None:
                return newer
            if self._memory is not None and self._memory.restore(candidate, group, layout):
                return candidate.name
        return self._from_disk(group, layout, newer_than=-1)

    def _from_disk(self, group: Group, layout: Layout, *, newer_than: int) -> str | None:
        directory = self._config.checkpoint_dir
        if directory is None:
            return None
        if layout.shards > 1:
            found = restore_together(
                self._state, directory, group, layout, self._refused, progress=self._progress,
                device=self._config.device, newer_than=newer_than,
            )  # fmt: skip
        else:
            found = checkpointing.restore_newest(
                self._state, directory, self._refused, progress=self._progress, newer_than=newer_than
            )
        return found.name if found else None

    def close(self) -> None:
        """Finish what is under way, within END_S."""
        self._settle()
        if self._memory is not None:
            self._memory.close()

    def _writers(self, layout: Layout) -> int:
        """How many ranks, from 0 on, write a part: the first replica, or all where nothing is sharded and all share."""
        return layout.world if layout.shards == 1 and self._config.saves.sharded else layout.shards

    def _order(self, directory: Path, generation: int, rank: int, writers: int) -> tuple[Order, list[Chunk]]:
        given_up = self._given_up

        def check() -> None:
            if given_up.is_set():
                raise GenerationLost("the save was given up")

        return checkpointing.order_of(
            self._state, directory, generation=generation, writer=rank, writers=writers,
            delta_every=self._config.saves.delta, disk=self._on_disk, check=check, since=self._since,
            progress=self._progress,
        )  # fmt: skip

    def _save_now(self, order: Order, chunks: Sequence[Chunk], began_s: float) -> None:
        given_up = order.check

        def check() -> None:
            self._check()
            given_up()
            self._progress()

        outcome = self._write_out(replace(order, check=check), chunks, began_s, None, (GenerationLost,))
        self._history = self._history.saved(began_s, self._clock_s() - began_s)
        if self._commits:
            self._saving.report(outcome)

    def _save_later(self, order: Order, chunks: Sequence[Chunk], began_s: float) -> None:
        copies = self._snapshot.take(chunks)
        blocked_s = self._clock_s() - began_s
        self._history = self._history.saved(began_s, blocked_s)
        order = replace(order, disk=self._on_disk_later, progress=None)
        self._background.start(lambda: self._write_out(order, copies, began_s, blocked_s, ()))

    def _write_out(
        self, order: Order, chunks: Sequence[Chunk], began_s: float, blocked_s: float | None,
        passes: tuple[type[BaseException], ...],
    ) -> Outcome:  # fmt: skip
        """On any thread. A writer that does not commit leaves its failure to the one that does to say."""
        save = partial(checkpointing.write, order, chunks)
        outcome = self._saving.tried(order.step, save, since_s=began_s, passes=passes, blocked_s=blocked_s)
        if outcome.saved is None:
            return outcome
        self._written.add(outcome.saved[0].name)
        done = pruned(
            order.directory, self._config.checkpoint_keep, agreed=self._agreement(), recorded=self._written,
            disk=order.disk, progress=order.progress,
        )  # fmt: skip
        return replace(outcome, pruned=done)

    def _agreement(self) -> Agreement | None:
        """What is known of the comparison of replicas; None: they are not compared."""
        config = self._config
        if config.verify_every == 0 or config.world == config.shards:
            return None
        return Agreement(step=self._agreed(), every=config.verify_every)

    def _settle(self) -> None:
        """Wait for the save under way, and give it up when that takes too long."""
        if not self._background.wait(END_S):
            self._given_up.set()
        self._report()

    def _report(self) -> None:
        outcome = self._background.take()
        if outcome is not None and self._commits:
            self._saving.report(outcome)

    def _on_disk(self, what: str, path: Path) -> None:
        self._progress()  # a slow disk is no hang
        self._on_disk_later(what, path)

    def _on_disk_later(self, what: str, path: Path) -> None:
        """Without a sign of progress: this is not the training thread."""
        if self.disk is not None:
            self.disk(what, path)

    def _refused(self, bad: Checkpoint, reason: str) -> None:
        if bad.name in self._bad:
            return  # looked at twice, as it is newer than several in memory
        self._bad.add(bad.name)
        checkpoints.note_refused(bad, reason)
        self._write(Kind.CHECKPOINT_REFUSED, step=bad.step, checkpoint=bad.name, reason=reason)
