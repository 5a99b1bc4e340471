"""The simulated key-value store: the effects of its end, or of a slow one, on groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FIRST_PORT = 1
ROUND_TRIP_S = 0.0002
REQUESTS = 2  # a member's requests for each other member while a group forms


class SimStore:
    """Implements ``harness.launch.launcher.StoreControl``. ``on_end``: called when the store is
    killed.
    """

    def __init__(self) -> None:
        self.port = FIRST_PORT
        self.on_end: Callable[[], None] = lambda: None
        self._latency_s = 0.0
        self._ended: Mapping[str, Any] | None = None

    def signal(self, signum: int) -> None:
        """End the store, by any signal; the next one exists at once."""
        name = f"store{self.port}"
        self.port += 1
        self._ended = {
            "store": name,
            "reaped_signal": signum,
            "reaped_exit_code": None,
            "next_port": self.port,
        }
        self.on_end()

    def set_latency(self, seconds: float) -> None:
        """Delay requests from now on."""
        self._latency_s = seconds

    def ended(self) -> Mapping[str, Any] | None:
        """How the last one ended."""
        return self._ended

    def round_trip_s(self) -> float | None:
        """Round trip; known at once."""
        return ROUND_TRIP_S + self._latency_s

    def forming_s(self, size: int) -> float:
        """Extra time for a group of that size to form."""
        return REQUESTS * size * self._latency_s
