"""How far a node's monotonic clock is from ours, and how sure that is: from questions and answers
with four times.

    offset = ((t1 - t0) + (t2 - t3)) / 2          the node's clock minus ours
    bound  = ((t3 - t0) - (t2 - t1)) / 2          how uneven the two ways can be at most

The best of the last answers counts: that with the smallest bound, which grows as it ages, because
clocks drift.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# an upper bound on how fast two undisciplined clocks of any servers drift apart, per time passed
DRIFT = 200e-6
WINDOW = 32
REPEAT_S = 10.0  # between two lines in the log the bound grows by half of that times DRIFT: 1 ms
_FIRST_TIME_NAMESPACE = 0xEFFFFFFA  # include/linux/proc_ns.h


class Offset(NamedTuple):
    """``offset_ns``: the node's clock minus ours; ``bound_ns``: how far the offset can be wrong."""

    offset_ns: int
    bound_ns: int


class _Sample(NamedTuple):
    offset_ns: float
    bound_ns: float
    at_ns: int

    def aged(self) -> float:
        """Its bound at a time that is the same for all, but for a constant."""
        return self.bound_ns - self.at_ns * DRIFT


class ClockWatch:
    """Watches the clock of one node. All times in nanoseconds."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=WINDOW)
        self._best: _Sample | None = None
        self._told: Offset | None = None
        self._told_ns = 0

    def answered(self, *, sent_ns: int, received_ns: int, answered_ns: int, back_ns: int) -> None:
        """A question went out and came back (our clock) and was received and answered (the node's).
        An answer that came before its question, or was given before it was received, counts for
        nothing.
        """
        there_and_back = (back_ns - sent_ns) - (answered_ns - received_ns)
        if answered_ns < received_ns or there_and_back < 0:
            return
        offset = ((received_ns - sent_ns) + (answered_ns - back_ns)) / 2
        self._samples.append(_Sample(offset, there_and_back / 2, back_ns))
        # all age alike: which is the best changes with the samples alone
        self._best = min(self._samples, key=_Sample.aged)

    def offset(self, now_ns: int) -> Offset | None:
        """The best estimate; None before the first answer."""
        best = self._best
        if best is None:
            return None
        grown = best.bound_ns + max(0, now_ns - best.at_ns) * DRIFT
        return Offset(offset_ns=round(best.offset_ns), bound_ns=int(grown) + 1)

    def changed(self, now_ns: int) -> Offset | None:
        """What deserves a line in the log: the first estimate, one that contradicts the last one
        reported, and one every REPEAT_S.
        """
        now = self.offset(now_ns)
        if now is None:
            return None
        told = self._told
        moved = told is not None and abs(now.offset_ns - told.offset_ns) > told.bound_ns
        if told is not None and not moved and now_ns - self._told_ns < REPEAT_S * 1e9:
            return None
        self._told, self._told_ns = now, now_ns
        return now


def boot_id() -> str:
    """Identifies this boot of this machine: processes with the same id share a monotonic clock.
    Where a process has clocks of its own (a time namespace), that is part of the id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):  # a kernel without time namespaces
        namespace = os.stat("/proc/self/ns/time").st_ino
        return boot if namespace == _FIRST_TIME_NAMESPACE else f"{boot} {namespace}"
    return boot
