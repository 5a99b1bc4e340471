"""Two moments in the wrong order, and how much of that the error of clocks explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SAME_CLOCK_S = 0.001
"""Allowance on one machine with one clock: cores may differ by microseconds, and durations are
rounded.
"""


@dataclass(frozen=True, kw_only=True)
class Slip:
    """Two moments in the wrong order. ``by_s``: how far; ``blur_s``: error of the clocks."""

    text: str
    by_s: float
    blur_s: float

    @property
    def sure(self) -> bool:
        """Whether the error of the clocks cannot explain it."""
        return self.by_s > self.blur_s

    @property
    def near(self) -> bool:
        """Whether only the errors of several clocks can explain it."""
        return not self.sure and self.by_s > SAME_CLOCK_S


def durations(values: Mapping[str, Iterable[tuple[str, float]]], blur_s: float) -> list[Slip]:
    """Negative durations. ``values``: subject -> its parts by name, in seconds; ``blur_s``: error
    of the clocks.
    """
    return [
        Slip(text=f"{name} of {of} took {seconds:.6f} s", by_s=-seconds, blur_s=blur_s)
        for of, parts in values.items()
        for name, seconds in parts
        if seconds < 0
    ]
