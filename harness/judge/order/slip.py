"""Two moments in the wrong order, and how far clocks explain it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SAME_CLOCK_S = 0.001
"""Allowed on one machine, whose clock is one: cores may differ by microseconds, durations are
rounded.
"""


@dataclass(frozen=True, kw_only=True)
class Slip:
    """Two moments in the wrong order. ``by_s``: how far; ``blur_s``: how far the clocks allow."""

    text: str
    by_s: float
    blur_s: float

    @property
    def sure(self) -> bool:
        """Whether no error of the clocks explains it."""
        return self.by_s > self.blur_s

    @property
    def near(self) -> bool:
        """Whether it takes the errors of several clocks to explain it."""
        return not self.sure and self.by_s > SAME_CLOCK_S


def durations(values: Mapping[str, Iterable[tuple[str, float]]], blur_s: float) -> list[Slip]:
    """Durations that are negative. ``values``: what each is of -> its parts by name, in seconds;
    ``blur_s``: how far clocks allow.
    """
    return [
        Slip(text=f"{name} of {of} took {seconds:.6f} s", by_s=-seconds, blur_s=blur_s)
        for of, parts in values.items()
        for name, seconds in parts
        if seconds < 0
    ]
