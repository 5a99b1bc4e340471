"""What the outside sees of a rank, and what the rank sees of the outside: its marks, and its wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from recovery.transport.progress_counters import MarkPage

_TIME = time.time
_TIME_NS = time.time_ns


class SignsShim:
    """Implements ``chaos.fault.targets.Signs`` for a real rank."""

    def __init__(self, marks: MarkPage) -> None:
        self._marks = marks

    def drop_heartbeat(self, dropped: bool) -> None:
        """See chaos.fault.targets.Signs."""
        if dropped:
            self._marks.hide()
        else:
            self._marks.show()

    def set_wall_offset(self, seconds: float) -> None:
        """See chaos.fault.targets.Signs. Code that took ``time.time`` itself at its import keeps the true clock."""
        time.time, time.time_ns = _shifted(seconds) if seconds else (_TIME, _TIME_NS)

    def wall_ns(self) -> int:
        """See chaos.fault.targets.Signs."""
        return time.time_ns()


def _shifted(seconds: float) -> tuple[Callable[[], float], Callable[[], int]]:
    return (lambda: _TIME() + seconds), (lambda: _TIME_NS() + int(seconds * 1e9))
