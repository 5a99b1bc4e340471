"""Tracks the effects of faults that act now; each effect lasts until its own fault ends, even when
several act on one target.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class ActiveEffects:
    """Effects in force on one arm, or on one rank of it.

    ``what``: kind of effect; ``on``: its target; ``by``: the fault that causes it, one name for
    each occurrence.
    """

    def __init__(self) -> None:
        self._wanted: dict[tuple[str, Hashable], dict[Hashable, Any]] = {}

    def begin(self, what: str, on: Hashable, by: Hashable, value: Any = True) -> list[Any]:
        """Add one occurrence; returns the values of all occurrences in force, the newest last."""
        wanted = self._wanted.setdefault((what, on), {})
        wanted.pop(by, None)
        wanted[by] = value
        return list(wanted.values())

    def end(self, what: str, on: Hashable, by: Hashable) -> list[Any]:
        """Remove one occurrence; returns the values of those that are left, the newest last."""
        wanted = self._wanted.get((what, on), {})
        wanted.pop(by, None)
        return list(wanted.values())

    def now(self, what: str, on: Hashable) -> list[Any]:
        """The values of the occurrences in force, the newest last."""
        return list(self._wanted.get((what, on), {}).values())
