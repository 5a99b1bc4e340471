"""What faults do at present: of several at once on one thing each lasts until it is over itself."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class InForce:
    """Of one arm, or of one rank of it.

    ``what``: kind of effect; ``on``: the thing that it is on; ``by``: who has it done, one name for
    each occurrence.
    """

    def __init__(self) -> None:
        self._wanted: dict[tuple[str, Hashable], dict[Hashable, Any]] = {}

    def begin(self, what: str, on: Hashable, by: Hashable, value: Any = True) -> list[Any]:
        """One more wants it so; what all want now, the newest last."""
        wanted = self._wanted.setdefault((what, on), {})
        wanted.pop(by, None)
        wanted[by] = value
        return list(wanted.values())

    def end(self, what: str, on: Hashable, by: Hashable) -> list[Any]:
        """It is over; what the others want still."""
        wanted = self._wanted.get((what, on), {})
        wanted.pop(by, None)
        return list(wanted.values())

    def now(self, what: str, on: Hashable) -> list[Any]:
        """What is wanted at present."""
        return list(self._wanted.get((what, on), {}).values())
