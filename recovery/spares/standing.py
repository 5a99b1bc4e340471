"""Which members of a new generation hold its state already, which lack one step, and which need a
copy. Pure; used by real and simulated ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

SETTLE_SILENCE_S = 2.0
"""How long a spare waits for steps that it lacks while nothing arrives. A feeder that is alive
closes the connection once it has sent all, and one that has died closes it at once.
"""
WORDS = 4
"""Numbers in a standing."""
AGAIN_STEPS = 8
"""Steps after which a spare that could not follow gets the whole state once more; twice as many
each time, up to MOST_STEPS, so that a spare that is too slow for the job costs it little.
"""
MOST_STEPS = 1024


def pause_steps(tries: int) -> int:
    """Steps until the next copy of the state, after so many."""
    return min(MOST_STEPS, AGAIN_STEPS << min(tries, 16))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What one member brings. ``receives``: the supervisor does not count on its state; ``step``:
    the one its state is of (-1: it claims none); ``digest``: of some of its values, as a number;
    ``retained``: the step whose reduced gradients it still has (-1: none).
    """

    receives: bool
    step: int
    digest: int
    retained: int

    def words(self) -> list[int]:
        """As WORDS numbers, for a message between ranks."""
        return [int(self.receives), self.step, self.digest, self.retained]

    @classmethod
    def of(cls, words: Sequence[int]) -> Standing:
        """The other way round."""
        receives, step, digest, retained = words
        return cls(receives=bool(receives), step=step, digest=digest, retained=retained)


def number_of(digest: str) -> int:
    """A digest as ranks exchange it; 0 for none."""
    return xxhash.xxh3_64_intdigest(digest.encode()) >> 1 if digest else 0


def one_behind(standings: Mapping[int, Standing], source: int) -> tuple[int, ...]:
    """Ranks that lack only the step whose gradients ``source`` still has."""
    giver = standings[source]
    if giver.retained != giver.step:
        return ()
    return tuple(
        rank
        for rank, one in standings.items()
        if one.receives and one.step >= 0 and one.step == giver.step - 1
    )


def in_want(standings: Mapping[int, Standing], source: int) -> tuple[int, ...]:
    """Ranks that need a copy of the state of ``source``: all that receive and do not hold the same
    step with the same digest.
    """
    giver = standings[source]
    return tuple(
        rank
        for rank, one in standings.items()
        if one.receives and (one.step, one.digest) != (giver.step, giver.digest)
    )
