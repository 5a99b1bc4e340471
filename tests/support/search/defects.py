"""Implementations with one defect each: a simulated rank, or a strategy, that goes wrong at one
point.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import Event, EventWriter, Kind
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.rank import SimRank
from trainchaos.harness.sim.rank.state import Reduced, ReduceInput, State, combine
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import MANIFEST, Checkpoint
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint
from trainchaos.recovery.data import order
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import ClusterView, Decision

MS = 1_000_000
Restored = tuple[Checkpoint, dict[str, Any]] | None


def _sound(checkpoint: Checkpoint) -> bool:
    try:
        checkpoints.verify(checkpoint)
    except CorruptCheckpoint:
        return False
    return True


class OtherBatch(Behaviour):
    """After recovery one step trains on the batch ``by`` steps away."""

    def __init__(self, by: int) -> None:
        self._by = by

    def batch(self, rank: SimRank, step: int) -> list[int]:
        """The wrong one, once."""
        config = rank.config
        wrong = step + self._by if rank.generation > 1 and step == 45 else step
        return order.batch(wrong, config.global_batch, config.samples, config.seed)


class RestoresOlder(Behaviour):
    """Takes the good checkpoint before the newest good one, where there are two."""

    def restore(self, rank: SimRank, refused: Callable[[Checkpoint, str], None]) -> Restored:
        """The second."""
        newest = super().restore(rank, refused)
        good = [
            one
            for one in checkpoints.newest_first(rank.config.checkpoint_dir)
            if newest and one.step < newest[0].step
        ]
        return (good[0], checkpoints.verify(good[0])) if good and _sound(good[0]) else newest


class RestoresUnverified(Behaviour):
    """Takes the newest checkpoint as it is."""

    def restore(self, rank: SimRank, refused: Callable[[Checkpoint, str], None]) -> Restored:
        """The first."""
        newest = checkpoints.newest_first(rank.config.checkpoint_dir)[0]
        return newest, json.loads((newest.path / MANIFEST).read_text())


class ForgetsRandomness(Behaviour):
    """Random numbers are counted from the generation's begin."""

    def random_word(self, rank: SimRank, step: int, micro: int) -> bytes:
        """Of another step."""
        return super().random_word(rank, step + rank.generation - 1, micro)


class Zombie(Behaviour):
    """A stopped process survives the kill that fences it, and commits the step it was at."""

    def __init__(self) -> None:
        self._woken = False

    def obeys(self, rank: SimRank, signum: int) -> bool:
        """The first kill comes too late."""
        if signum != signal.SIGKILL or not rank.process.stopped or self._woken:
            return True
        self._woken = True
        rank.process.clock.after(150 * MS, partial(self._commit, rank))
        return False

    def _commit(self, rank: SimRank) -> None:
        state = rank.state
        rank.write(
            Kind.STEP_COMMITTED,
            step=state.step + 1,
            rank=rank.rank,
            world=rank.world,
            samples=24,
            loss=2.0,
            lr=1e-3,
            wire_bytes=1,
            grad_norm=1.0,
            optimizer_step=state.step + 1,
            scheduler_step=state.step + 1,
            seconds={},
        )
        rank.process.signal(signal.SIGKILL)


class CommitsNan(Behaviour):
    """Never looks at what it applies."""

    def accepts(self, rank: SimRank, reduced: Reduced) -> bool:
        """Everything."""
        return True


class ScalesRate(Behaviour):
    """Scales the learning rate with the world, though the batch stays the same."""

    def learning_rate(self, rank: SimRank, lr: float) -> float:
        """The linear rule, misapplied."""
        return lr * rank.world / rank.config.world


class StalePeer(Behaviour):
    """Sends parameters of the step before, under the counters of today."""

    def __init__(self) -> None:
        self._older: dict[str, State] = {}

    def learning_rate(self, rank: SimRank, lr: float) -> float:
        """Right; it is asked for just before a step is applied."""
        self._older[rank.process.name] = rank.state
        return lr

    def snapshot(self, rank: SimRank) -> State:
        """Half old, half new."""
        older = self._older[rank.process.name]
        return replace(rank.state, parameters=older.parameters)

    def held(self, rank: SimRank) -> str:
        """Without the comparison at the start of a generation, which would find it: the checkers
        are on trial here.
        """
        return ""


class BlamesAnother(Behaviour):
    """Reports the rank after the one with non-finite values."""

    def blamed(self, rank: SimRank, ranks: list[int]) -> list[int]:
        """Off by one."""
        return [(blamed + 1) % rank.world for blamed in ranks]


class DropsShare(Behaviour):
    """After recovery the last rank's gradient is left out of the sum."""

    def combine(self, rank: SimRank, parts: dict[int, ReduceInput]) -> Reduced:
        """All but one."""
        return combine(dict(list(parts.items())[:-1]) if rank.generation > 1 else parts)


class DeafOnce(Behaviour):
    """The first kill does nothing: an injector that is none."""

    def __init__(self) -> None:
        self._heard = False

    def obeys(self, rank: SimRank, signum: int) -> bool:
        """From the second on."""
        heard, self._heard = self._heard, True
        return heard


class Immortal(Behaviour):
    """One process ends neither when told to nor when killed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def obeys(self, rank: SimRank, signum: int) -> bool:
        """Not that one."""
        return rank.process.name != self._name

    def stops(self, rank: SimRank) -> bool:
        """Not that one."""
        return rank.process.name != self._name


class LosesLine(Behaviour):
    """The last line of the victim's log never reaches the disk, though its mark says so."""

    def writer(self, directory: Path, name: str, clock_ns: Callable[[], int]) -> EventWriter:
        """One that forgets."""
        return _Forgetful(directory, name, clock_ns)


class _Forgetful(EventWriter):
    def write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        if (kind, step, self.actor) != (Kind.BATCH_TAKEN, 33, "w2"):
            return super().write(kind, step=step, generation=generation, **data)
        self.last_seq += 1
        return Event(
            kind=kind,
            actor=self.actor,
            seq=self.last_seq,
            time_ns=self._clock_ns(),
            generation=self.generation,
            step=step,
            data=data,
        )


class DoesNothing(DropReplica):
    """Never answers a failure."""

    def on_failure(self, view: ClusterView) -> Decision:
        """Nothing."""
        return Decision(actions=(), reason="let us wait and see")


class DiesOfFailedSave(Behaviour):
    """A save that fails ends the rank, as an exception that nobody catches."""

    def survives_failed_save(self, rank: SimRank) -> bool:
        """Never."""
        return False


class LeavesOutSilently(Behaviour):
    """One sample of a step is left out, and nobody has said so."""

    def batch(self, rank: SimRank, step: int) -> list[int]:
        """All but the last."""
        whole = super().batch(rank, step)
        return whole[:-1] if step == 45 else whole


class NeverSwaps(HotSpare):
    """Shrinks although a spare waits."""

    def on_failure(self, view: ClusterView) -> Decision:
        """As if there were none."""
        return DropReplica(rejoin=False).on_failure(view)

    def on_ready(self, view: ClusterView) -> Decision:
        """Nor now."""
        return Decision(actions=(), reason="kept as spare")
