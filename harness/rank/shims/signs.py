"""A rank's heartbeat marks, which the outside sees, and its wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainchaos.recovery.transport.progress_counters import MarkPage

_TIME = time.time
_TIME_NS = time.time_ns


class SignsShim:
    """Implements ``chaos.fault.targets.Signs`` for a real rank. ``wanted``: the method of
    ``harness.rank.shims.agenda.Agenda``.
    """

    def __init__(self, marks: MarkPage, wanted: Callable[[str, Any], list[Any]]) -> None:
        self._marks = marks
        self._wanted = wanted

    def drop_heartbeat(self, dropped: bool) -> None:
        if self._wanted("heartbeat", dropped or None):
            self._marks.hide()
        else:
            self._marks.show()

    def set_wall_offset(self, seconds: float) -> None:
        """See chaos.fault.targets.Signs. Code that took a reference to ``time.time`` at its import
        keeps the true clock.
        """
        offsets = self._wanted("clock", seconds or None)
        time.time, time.time_ns = _shifted(offsets[-1]) if offsets else (_TIME, _TIME_NS)

    def wall_ns(self) -> int:
        return time.time_ns()


def _shifted(seconds: float) -> tuple[Callable[[], float], Callable[[], int]]:
    return (lambda: _TIME() + seconds), (lambda: _TIME_NS() + int(seconds * 1e9))
