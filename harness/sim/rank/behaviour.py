"""The points at which a simulated rank could go wrong, each implemented correctly.

Tests replace single methods to get an implementation with one known defect; a scenario cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.events.log import EventWriter
from trainchaos.harness.sim.rank.state import Own, Reduced, ReduceInput, State, combine, digest
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint
from trainchaos.recovery.data import order

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank


class Behaviour:
    """The correct behaviour."""

    def writer(self, directory: Path, name: str, clock_ns: Callable[[], int]) -> EventWriter:
        """A process's event log."""
        return EventWriter(directory, name, clock_ns)

    def versions(self, rank: SimRank) -> dict[str, str]:
        """Versions of a process's software."""
        return {"torch": "simulated", "backend": "gloo"}

    def batch(self, rank: SimRank, step: int) -> list[int]:
        """The global batch of a step."""
        config = rank.config
        return order.batch(step, config.global_batch, config.samples, config.seed)

    def random_word(self, rank: SimRank, step: int, micro: int) -> bytes:
        """Output of the rank's random generators in a step, derived from seed, micro-batch (the
        rank) and step.
        """
        return digest("rng", rank.state.seed, micro, step)

    def learning_rate(self, rank: SimRank, lr: float) -> float:
        """The scheduler's learning rate."""
        return lr

    def combine(self, rank: SimRank, parts: dict[int, ReduceInput]) -> Reduced:
        """The all-reduce; ``rank``: the last to enter it."""
        return combine(parts)

    def accepts(self, rank: SimRank, reduced: Reduced) -> bool:
        """Whether a reduced gradient may be applied."""
        return reduced.finite

    def blamed(self, rank: SimRank, ranks: list[int]) -> list[int]:
        """The ranks to report for non-finite values."""
        return ranks

    def survives_failed_save(self, rank: SimRank) -> bool:
        """Whether training continues after a failed save."""
        return True

    def snapshot(self, rank: SimRank) -> State:
        """The state to send to a peer."""
        return rank.state

    def held(self, rank: SimRank) -> str:
        """The digest of its state that it reports when it joins; empty for no report."""
        return rank.state.voted()

    def put_back(self, rank: SimRank, own: Own) -> Own:
        """What a rank has of its own when a step is done again; ``own``: as the lost attempt
        began.
        """
        return own

    def restored_own(self, rank: SimRank) -> Own:
        """What a rank has of its own after a restore; where the checkpoint does not know the rank,
        that of the one whose state it has.
        """
        owns = rank.state.owns
        return owns[rank.rank] if rank.rank < len(owns) else rank.state.own

    def restore(
        self, rank: SimRank, refused: Callable[[Checkpoint, str], None]
    ) -> tuple[Checkpoint, dict[str, Any]] | None:
        """The checkpoint to restore, with its manifest."""
        wanted = partial(rank.checkpoints.choosing.wanted, None)
        return checkpoints.newest_good(rank.config.checkpoint_dir, refused, wanted)

    def obeys(self, rank: SimRank, signum: int) -> bool:
        """Whether a signal reaches the process it is sent to."""
        return True

    def stops(self, rank: SimRank) -> bool:
        """Whether the rank ends on a stop order."""
        return True
