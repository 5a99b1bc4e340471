"""Writes one rank's part of checkpoints on disk, on another thread, and reports the outcome."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.background import BackgroundWorker, Snapshot
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Disk, Hand
from trainchaos.recovery.checkpoint.files.custody import agreement
from trainchaos.recovery.checkpoint.files.fence import CheckpointFence
from trainchaos.recovery.checkpoint.files.retention import prune
from trainchaos.recovery.checkpoint.files.saving import RankHooks, SaveOutcome, Saving
from trainchaos.recovery.checkpoint.saves import Content, SaveOrder
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.policy.interval import SaveSchedule
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.state.state import TrainState

PLACED_S = 0.5  # longest wait, before this rank parks, for a save that has its name
END_S = 60.0  # longest wait for a sign of life of a save that is under way


class SaveWriter:
    """One save at a time. Used by the training thread. ``disk``: the disk's answers; ``timetable``:
    learns how long saves hold training up; ``since``: the step from which this generation continued
    (-1: unknown).
    """

    def __init__(
        self,
        config: JobConfig,
        state: TrainState,
        hooks: RankHooks,
        saving: Saving,
        fence: CheckpointFence,
        disk: Disk,
        timetable: SaveSchedule,
    ) -> None:
        self.since = -1
        self.background = BackgroundWorker()
        self._config = config
        self._state = state
        self._hooks = hooks
        self._saving = saving
        self._fence = fence
        self._disk = disk
        self._timetable = timetable
        self._snapshot = Snapshot()
        self._given_up = threading.Event()  # the save under way
        self._placed = threading.Event()  # the save under way has its name
        self._together = False  # other ranks write parts of it
        # verified by this rank in this generation, and not read again to know it
        self._written: set[str] = set()

    def save(self, step: int, *, generation: int, rank: int, writers: int, later: bool) -> None:
        """Save the state as it is now, as one of ``writers`` writers, of which rank 0 commits.
        ``later``: only wait for a copy of it. A failed save is reported. Raises GenerationLost.
        """
        began_s = self._saving.begin(step, whole=rank == 0)
        order = self._order(generation, rank, writers)
        if self.background.busy:
            self._not_saved(order, step, began_s, "the save before has not ended")
            return
        content, blocked_s = saves.content_of(self._state, rank, writers), None
        if later:
            try:
                copies = self._snapshot.take(content.chunks, self._hooks.progress)
            except (OSError, MemoryError, RuntimeError) as error:
                why = f"no copy of the state: {checkpoints.first_line(error)}"
                self._not_saved(order, step, began_s, why)
                return
            content = replace(content, chunks=copies)
            blocked_s = self._hooks.clock_s() - began_s
        self.background.start(partial(self._write_out, order, content, began_s, blocked_s))
        if not later:
            self._await()
        self._timetable.saved(began_s, self._hooks.clock_s() - began_s)

    def _await(self) -> None:
        """Wait for a save of live tensors, which has ended even when the generation is lost."""
        try:
            self.background.wait(math.inf, self._hooks.progress, self._hooks.check)
        except GenerationLost:
            self._given_up.set()
            self.background.wait(math.inf, self._hooks.progress)
            outcome = self.background.take()
            if outcome is not None and outcome.bytes is not None:
                self._saving.report(outcome)
            raise
        self.report()

    def _order(self, generation: int, rank: int, writers: int) -> SaveOrder:
        self._given_up, self._placed = threading.Event(), threading.Event()
        self._together = writers > 1
        given_up, placed, tenure = self._given_up, self._placed, self._fence.tenure

        def check() -> None:
            if given_up.is_set():
                raise GenerationLost("the save was given up")

        @contextmanager
        def guard() -> Iterator[None]:
            with self._fence.held(tenure=tenure, check=check):
                yield
                placed.set()

        def alive() -> None:
            self.background.moved()
            check()

        return SaveOrder(
            directory=self._fence.directory,
            generation=generation,
            writer=rank,
            writers=writers,
            delta=self._config.saves.delta,
            since=self.since,
            job=self._config.job_id,
            hand=Hand(disk=self._on_disk, guard=guard, progress=self.background.moved),
            check=alive,
            enter=partial(self._fence.enter, generation, takes=rank == 0),
            still=partial(self._fence.look, generation),
        )

    def _not_saved(self, order: SaveOrder, step: int, began_s: float, why: str) -> None:
        """The rank that commits reports a failed save; the others report to that rank."""
        if order.writer:
            saves.give_up(order, step, why)
        seconds, whole = self._hooks.clock_s() - began_s, order.writer == 0
        self._saving.report(SaveOutcome(step=step, whole=whole, seconds=seconds, error=why))

    def _write_out(
        self, order: SaveOrder, content: Content, began_s: float, blocked_s: float | None
    ) -> SaveOutcome:
        """Runs on the other thread. A writer that does not commit leaves its failure to the rank
        that does.
        """
        outcome = self._saving.attempt(
            content.step,
            partial(saves.write, order, content),
            since_s=began_s,
            whole=order.writer == 0,
            blocked_s=blocked_s,
        )
        if outcome.bytes is None:
            return outcome
        self._written.add(checkpoints.name_of(content.step))
        config = self._config
        agreed = agreement(
            self._hooks.agreed(),
            every=config.verify_every,
            world=config.world,
            shards=config.shards,
        )
        done = prune(
            self._fence.directory,
            config.checkpoint_keep,
            agreed=agreed,
            recorded=self._written,
            hand=replace(order.hand, guard=self._fence.held),
        )
        return replace(outcome, cleared=done)

    @property
    def hand(self) -> Hand:
        """For what the training thread changes itself."""

        def disk(what: str, path: Path) -> None:
            self._hooks.progress()  # a slow disk is no hang
            self._on_disk(what, path)

        return Hand(disk=disk, guard=self._fence.held, progress=self._hooks.progress)

    def _on_disk(self, what: str, path: Path) -> None:
        self.background.moved()
        self._disk(what, path)

    def joined(self) -> None:
        """A new generation: what is written from now on belongs to it."""
        self._written = set()

    def parked(self) -> None:
        """This rank leaves its generation: nothing gets its name from now on. Wait briefly for a
        save that has its name already, and report how it ended.
        """
        self._fence.suspend()
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
        if not self.background.wait(END_S, self._hooks.progress):
            self._given_up.set()
        self.report()

    def close(self) -> None:
        """Finish the save under way, but for one that waits for its name, because this rank has
        left its generation.
        """
        if self._fence.suspended:
            self._fence.give_up()
        self.settle()

    def report(self) -> None:
        """Report how the save under way ended, if it has."""
        outcome = self.background.take()
        if outcome is not None:
            self._saving.report(outcome)
