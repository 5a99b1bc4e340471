"""What faults have stopped at present: with several at once on one thing it goes on when the last of them ends."""

from __future__ import annotations

from collections import Counter


class Stops:
    """Of one arm. Things are processes, by name, and machines, by the number of their node."""

    def __init__(self) -> None:
        self._times = Counter[str | int]()

    def stop(self, what: str | int) -> None:
        """One fault more stops it."""
        self._times[what] += 1

    def goes_on(self, what: str | int) -> bool:
        """One less does. Whether none is left that does."""
        self._times[what] = max(0, self._times[what] - 1)
        return not self._times[what]
