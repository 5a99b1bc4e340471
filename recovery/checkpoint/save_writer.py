"""Writes one rank's part of a checkpoint, at once or in the background, and reports the outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.background import BackgroundWorker, Snapshot
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Disk
from trainchaos.recovery.checkpoint.files.custody import agreement
from trainchaos.recovery.checkpoint.files.fence import CheckpointFence
from trainchaos.recovery.checkpoint.files.retention import prune
from trainchaos.recovery.checkpoint.files.saving import SaveOutcome, Saving
from trainchaos.recovery.checkpoint.saves import Content, SaveOrder
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.policy.interval import SaveSchedule
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.state.state import TrainState

PLACED_S = 0.5  # longest wait, before this rank parks, for a save that has its name
END_S = 60.0  # longest wait for a sign of life of a save that is under way


class SaveWriter:
    """One save at a time. Used by the training thread; arguments as for ``Checkpointer``.

    ``disk``: replaces the disk's answers, for a fault injector; ``since``: the step from which this
    generation continued (-1: unknown).
    """

    def __init__(
        self,
        config: JobConfig,
        state: TrainState,
        *,
        saving: Saving,
        timetable: SaveSchedule,
        fence: CheckpointFence | None,
        check: Callable[[], None],
        progress: Callable[[], None],
        agreed: Callable[[], int],
        clock_s: Callable[[], float],
    ) -> None:
        self.disk: Disk | None = None
        self.since = -1
        self.background = BackgroundWorker()
        self._config = config
        self._state = state
        self._saving = saving
        self._timetable = timetable
        self._fence = fence
        self._check = check
        self._progress = progress
        self._agreed = agreed
        self._clock_s = clock_s
        self._snapshot = Snapshot()
        self._given_up = threading.Event()  # of the save under way
        self._placed = threading.Event()  # the save under way has its name
        # other ranks write parts of it; this rank commits it
        self._together = self._commits = False
        # verified by this rank in this generation, and not read again to know it
        self._written: set[str] = set()

    def save(
        self,
        directory: Path,
        *,
        generation: int,
        rank: int,
        writers: int,
        began_s: float,
        later: bool,
    ) -> None:
        """Save the state as it is now, as one of ``writers`` writers, of which rank 0 commits.
        ``later``: only the copy is made now. A failed save is reported. Raises GenerationLost.
        """
        self._given_up, self._placed = threading.Event(), threading.Event()
        self._together, self._commits = writers > 1, rank == 0
        fence, given_up = self._fence, self._given_up
        assert fence is not None  # set, because there is a directory

        def check() -> None:
            if given_up.is_set():
                raise GenerationLost("the save was given up")

        order = SaveOrder(
            directory=directory,
            generation=generation,
            writer=rank,
            writers=writers,
            delta=self._config.saves.delta,
            since=self.since,
            job=self._config.job_id,
            disk=self.on_disk,
            check=check,
            progress=self._progress,
            enter=partial(fence.enter, generation, takes=rank == 0),
            still=partial(fence.look, generation),
            guard=self.guard,
        )
        content = saves.content_of(self._state, rank, writers)
        if self.background.busy:
            self._not_saved(order, content.step, began_s, "the save before has not ended")
        elif later:
            self._save_later(order, content, began_s, fence.tenure)
        else:
            self._save_now(order, content, began_s)

    def joined(self) -> None:
        """A new generation: what is written from now on belongs to it."""
        self._written = set()

    def parked(self) -> None:
        """Wait briefly for a save that has its name already, and report how it ended."""
        if self._placed.is_set():
            self.background.wait(PLACED_S)
        self.report()

    def lost(self) -> None:
        """The generation is lost: a save by several ranks is given up."""
        if self._together:
            self._given_up.set()

    def settle(self) -> None:
        """Wait for the save under way, and give it up when it shows no sign of life for
        too long.
        """
        if not self.background.wait(END_S, self._progress):
            self._given_up.set()
        self.report()

    def report(self) -> None:
        """Report how the save in the background ended, if it has."""
        outcome = self.background.take()
        if outcome is not None:
            self._saving.report(outcome, whole=self._commits)

    @contextmanager
    def guard(
        self,
        *,
        waits: bool = False,
        check: Callable[[], None] | None = None,
        placed: threading.Event | None = None,
        tenure: int | None = None,
    ) -> Iterator[None]:
        """Around each rename: raises Fenced when this rank may not write any more. ``waits``: until
        it may again; ``placed``: set when the rename is done; ``tenure``: see
        ``CheckpointFence.held``.
        """
        assert self._fence is not None
        with self._fence.held(tenure=tenure, waits=waits, check=check):
            yield
            if placed is not None:
                placed.set()

    def _save_now(self, order: SaveOrder, content: Content, began_s: float) -> None:
        given_up = order.check

        def check() -> None:
            self._check()
            given_up()
            self._progress()

        order = replace(order, check=check)
        outcome = self._write_out(order, content, began_s, None, (GenerationLost,))
        self._timetable.saved(began_s, self._clock_s() - began_s)
        self._saving.report(outcome, whole=self._commits)

    def _save_later(self, order: SaveOrder, content: Content, began_s: float, tenure: int) -> None:
        try:
            copies = self._snapshot.take(content.chunks, self._progress)
        except (OSError, MemoryError, RuntimeError) as error:
            why = f"no copy of the state: {checkpoints.first_line(error)}"
            self._not_saved(order, content.step, began_s, why)
            return
        blocked_s = self._clock_s() - began_s
        self._timetable.saved(began_s, blocked_s)
        given_up, moved, placed = order.check, self.background.moved, self._placed

        def check() -> None:
            moved()
            given_up()

        later = replace(
            order,
            disk=self._on_disk_later,
            progress=moved,
            check=check,
            guard=partial(self.guard, waits=True, check=given_up, placed=placed, tenure=tenure),
        )
        copied = replace(content, chunks=copies)
        self.background.start(lambda: self._write_out(later, copied, began_s, blocked_s, ()))

    def _not_saved(self, order: SaveOrder, step: int, began_s: float, why: str) -> None:
        """The rank that commits reports a failed save; the others report to that rank."""
        if order.writer:
            saves.give_up(order, step, why)
        self._saving.report(self._saving.failed(step, why, began_s), whole=self._commits)

    def _write_out(
        self,
        order: SaveOrder,
        content: Content,
        began_s: float,
        blocked_s: float | None,
        passes: tuple[type[BaseException], ...],
    ) -> SaveOutcome:
        """Runs on any thread. A writer that does not commit leaves its failure to the rank that
        does.
        """
        save = partial(saves.write, order, content)
        outcome = self._saving.tried(
            content.step, save, since_s=began_s, passes=passes, blocked_s=blocked_s
        )
        if outcome.bytes is None:
            return outcome
        self._written.add(outcome.name)
        config = self._config
        done = prune(
            order.directory,
            config.checkpoint_keep,
            agreed=agreement(
                self._agreed(), every=config.verify_every, world=config.world, shards=config.shards
            ),
            recorded=self._written,
            disk=order.disk,
            progress=order.progress,
            guard=self.guard,
        )
        return replace(outcome, pruned=done)

    def on_disk(self, what: str, path: Path) -> None:
        """Before each operation on the disk, on the training thread. Raises OSError."""
        self._progress()  # a slow disk is no hang
        self._on_disk_later(what, path)

    def _on_disk_later(self, what: str, path: Path) -> None:
        """As ``on_disk``, without a sign of progress: this is not the training thread."""
        self.background.moved()
        if self.disk is not None:
            self.disk(what, path)
