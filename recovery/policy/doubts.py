"""Which checkpoints may hold a corrupted state: of whom, and after which step. Pure.

A doubt holds until somebody has put what it is about out of the way and said so, however many
generations that takes and whoever supervises the job meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Doubt = tuple[int, int]
"""(before, step): what a generation before ``before`` saved after ``step`` may hold a corrupted
state.
"""

MOST = 16  # of different steps; more are taken together, so that more is in doubt than has to be


def in_doubt(doubts: Sequence[Doubt], *, generation: int, step: int) -> bool:
    """Whether that generation's checkpoint of that step may hold a corrupted state."""
    return any(generation < before and step > since for before, since in doubts)


def together(doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
    """The same doubts in as few as say it, MOST at the most, by generation."""
    found: list[Doubt] = []
    for before, step in sorted(doubts, key=lambda doubt: (-doubt[0], doubt[1])):
        if all(other > step for _, other in found):  # all found are of later generations
            found.append((before, step))
    while len(found) > MOST:
        (before, _), (_, step) = found[-2:]
        found[-2:] = [(before, step)]
    return tuple(reversed(found))
