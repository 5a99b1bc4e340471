"""Checkpoints in memory, as the checkpointer uses them beside the disk: saving, how to report it,
and which to restore. Every rank of the first replica saves its part; with one shard that is
rank 0, since all hold the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files.checkpoints import first_line
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint
from trainchaos.recovery.checkpoint.files.saving import WriteRankEvent
from trainchaos.recovery.checkpoint.memory.client import KeeperClient, KeeperError
from trainchaos.recovery.checkpoint.memory.header import name_of
from trainchaos.recovery.checkpoint.memory_reading import Candidate, MemoryReading
from trainchaos.recovery.checkpoint.memory_state import MemorySave, MemoryState
from trainchaos.recovery.checkpoint.saves.reading import CheckpointMismatch
from trainchaos.recovery.checkpoint.together import votes
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.policy.interval import SaveSchedule
from trainchaos.recovery.policy.jobconfig import InMemory
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.transport.wire import CheckpointNote

PLACE = "memory"
SETTLE_S = 10.0  # longest wait, before a restore, for a save that is under way
_GOOD, _BAD, _MISMATCH = range(3)


class MemoryCheckpointer:
    """Used by the training thread; arguments as for
    ``recovery.checkpoint.checkpointer.Checkpointer``. ``seat``: this process's name;
    ``timetable``: learns how long saves hold training up.
    """

    def __init__(
        self,
        config: InMemory,
        state: TrainState,
        *,
        timetable: SaveSchedule,
        clock_s: Callable[[], float] = time.perf_counter,
        seat: str,
        device: str,
        write: WriteRankEvent,
        send: Callable[[CheckpointNote], object],
        check: Callable[[], None],
        progress: Callable[[], None],
        saves: Callable[[], object],
    ) -> None:
        self._timetable = timetable
        self._clock_s = clock_s
        self._saves = saves
        self._state = state
        self._device = device
        self._write = write
        self._send = send
        client = KeeperClient(config.socket, check=check)
        self._memory = MemoryState(
            state, client, job=config.job, seat=seat, check=check, progress=progress
        )
        self._part = {"place": PLACE, "shard": 0, "shards": 1}
        self._said = ""  # the last error, which is not shown to people repeatedly

    def after_commit(
        self, step: int, *, rank: int, layout: Layout, generation: int, asked: bool
    ) -> None:
        """Save if ``asked`` for; waits for the copy alone. The outcome of earlier saves is reported
        here too. A failed save is reported and never ends training. Raises what ``check`` raises.
        """
        self._report(generation)
        if not asked or layout.replica_of(rank):
            return
        began_s = self._clock_s()
        self._part = {"place": PLACE, "shard": layout.shard_of(rank), "shards": layout.shards}
        self._saves()
        self._write(Kind.CHECKPOINT_SAVING, step=step, checkpoint=name_of(step), **self._part)
        try:
            self._memory.save(generation=generation, layout=layout, rank=rank)
        except OSError as error:
            self._failed(step, f"{type(error).__name__}: {first_line(error)}")
        self._timetable.saved(began_s, self._clock_s() - began_s)

    def newest(self, group: Group, layout: Layout) -> Iterator[Candidate]:
        """Complete checkpoints, newest first. With several shards every rank of the group iterates
        over them at the same time: rank 0 names each.
        """
        self._memory.settle(SETTLE_S)
        first = layout.shards == 1 or group.rank == 0
        found = iter(self._candidates() if first else ())
        while True:
            candidate = next(found, None)
            if layout.shards > 1:
                candidate = self._agreed(group, candidate)
            if candidate is None:
                return
            yield candidate

    def restore(self, candidate: Candidate, group: Group, layout: Layout) -> bool:
        """Load a checkpoint; returns whether it was good. If not, live state is untouched on every
        rank.

        Called by the ranks that iterate over ``newest``; those of the first replica load. Raises
        CheckpointMismatch.
        """
        rank = group.rank if layout.shards > 1 else 0  # else only rank 0 restores
        if layout.replica_of(rank):
            return self._all_good(group, layout, _GOOD)
        with ExitStack() as stack:
            vote, reading, mismatch = self._verified(stack, candidate, layout, rank)
            good = self._all_good(group, layout, vote)
            if mismatch is not None:
                raise mismatch
            if good and reading is not None:
                reading.load()
                self._state.load_scalars(reading.scalars, reading.slots)
            return good

    def _verified(
        self, stack: ExitStack, candidate: Candidate, layout: Layout, rank: int
    ) -> tuple[int, MemoryReading | None, CheckpointMismatch | None]:
        """This rank's vote, with the part it is about to load."""
        try:
            reading = stack.enter_context(self._memory.reading(candidate, layout, rank))
            reading.verify()
        except (KeeperError, CorruptCheckpoint) as error:
            self._write(
                Kind.CHECKPOINT_REFUSED,
                step=candidate.step,
                checkpoint=candidate.name,
                reason=first_line(error),
                place=PLACE,
            )
            return _BAD, None, None
        except CheckpointMismatch as error:
            return _MISMATCH, None, error
        return _GOOD, reading, None

    def distrust(self, step: int, before: int) -> bool:
        """Have the keepers release what generations before ``before`` saved after ``step``; returns
        whether they have.
        """
        try:
            for gone in self._memory.forget(step, before):
                self._write(
                    Kind.CHECKPOINT_DELETED, step=gone, checkpoint=name_of(gone), place=PLACE
                )
        except KeeperError as error:
            self._write(
                Kind.CHECKPOINT_KEPT, checkpoint=PLACE, error=first_line(error), place=PLACE
            )
            return False
        return True

    def close(self) -> None:
        """Finish what is under way."""
        self._memory.close()

    def _all_good(self, group: Group, layout: Layout, vote: int) -> bool:
        """Whether every rank can load its part. Raises CheckpointMismatch when that of another rank
        does not fit.
        """
        if layout.shards == 1:
            return vote == _GOOD
        given = votes(group, vote, self._device)
        if _MISMATCH in given and vote != _MISMATCH:
            raise CheckpointMismatch(
                f"a checkpoint in memory does not fit rank {given.index(_MISMATCH)} of this job",
                hint="its log says what differs",
            )
        return set(given) == {_GOOD}

    def _candidates(self) -> list[Candidate]:
        try:
            return self._memory.candidates()
        except KeeperError as error:
            self._write(
                Kind.CHECKPOINT_REFUSED,
                step=0,
                checkpoint=PLACE,
                reason=first_line(error),
                place=PLACE,
            )
            return []

    def _agreed(self, group: Group, candidate: Candidate | None) -> Candidate | None:
        words = torch.full((3,), -1, dtype=torch.int64, device=self._device)
        if group.rank == 0 and candidate is not None:
            words = torch.tensor(
                [*candidate.moment, candidate.shards], dtype=torch.int64, device=self._device
            )
        group.broadcast(words, 0)
        generation, step, shards = (int(word) for word in group.read(words))
        return None if step < 0 else Candidate(moment=(generation, step), shards=shards)

    def _report(self, generation: int) -> None:
        for saved in self._memory.results():
            # One of a past generation may exist or not: it is not relied on.
            if saved.generation == generation:
                self._tell(saved)

    def _tell(self, saved: MemorySave) -> None:
        if saved.error:
            self._failed(saved.step, saved.error)
            return
        more = {"alone": saved.alone} if saved.alone else {}
        self._write(
            Kind.CHECKPOINT_COMMITTED,
            step=saved.step,
            checkpoint=name_of(saved.step),
            bytes=saved.bytes,
            seconds=round(saved.seconds, 6),
            blocked_s=round(saved.blocked_s, 6),
            copies=list(saved.copies),
            **self._part,
            **more,
        )
        self._said = ""

    def _failed(self, step: int, error: str) -> None:
        self._write(
            Kind.CHECKPOINT_FAILED, step=step, checkpoint=name_of(step), error=error, **self._part
        )
        if error[:40] != self._said:
            self._said = error[:40]
            self._send(
                CheckpointNote(
                    state="failed", checkpoint=name_of(step), step=step, error=error[:500]
                )
            )
