"""Checks of simulated places: each takes as long as a real one, and finds the place fit; implements
``recovery.health.care.place_check.Checker``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainchaos.harness.sim.world.clock import NS_PER_S
from trainchaos.recovery.health.care.place_check import Answer, Spot

TAKES_S = 3.0
"""1 to 4 s were measured of a processor (docs/health.md)."""


class SimChecks:
    """One after the other. ``now_ns``: simulated time."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._due_ns: dict[Spot, int] = {}

    def begin(self, spot: Spot) -> None:
        """See ``Checker``."""
        begins_ns = max([self._now_ns(), *self._due_ns.values()])
        self._due_ns[spot] = begins_ns + int(TAKES_S * NS_PER_S)

    def take(self) -> Sequence[Answer]:
        """See ``Checker``."""
        now_ns = self._now_ns()
        over = [spot for spot, due_ns in self._due_ns.items() if due_ns <= now_ns]
        self._due_ns = {spot: due for spot, due in self._due_ns.items() if due > now_ns}
        return [Answer(spot, True, "") for spot in over]

    def close(self) -> None:
        """See ``Checker``."""
        self._due_ns = {}
