"""Which checkpoints may hold a corrupted state: of which generations, and after which step. Pure.

A doubt holds until a rank has set the doubtful checkpoints aside and reported so, however many
generations and supervisors that takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Doubt = tuple[int, int]
"""(before, step): a checkpoint that a generation before ``before`` saved after ``step`` may hold a
corrupted state.
"""

MOST = 16  # of different steps; beyond that, doubts are merged into wider ones


def in_doubt(doubts: Sequence[Doubt], *, generation: int, step: int) -> bool:
    """Whether that generation's checkpoint of that step may hold a corrupted state."""
    return any(generation < before and step > since for before, since in doubts)


def together(doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
    """The same doubts, without redundant ones and MOST at the most, by generation."""
    found: list[Doubt] = []
    for before, step in sorted(doubts, key=lambda doubt: (-doubt[0], doubt[1])):
        if all(other > step for _, other in found):  # all found so far are of later generations
            found.append((before, step))
    while len(found) > MOST:
        (before, _), (_, step) = found[-2:]
        found[-2:] = [(before, step)]
    return tuple(reversed(found))
