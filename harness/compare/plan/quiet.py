"""Measures whether other programs use the machine, before each arm, when nothing of ours runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.5
BUSY = 0.1
"""Share of the processors that other programs may use."""
STAT = Path("/proc/stat")


def busy_share(
    look_s: float = LOOK_S, *, stat: Path = STAT, sleep: Callable[[float], None] = time.sleep
) -> float | None:
    """Share of processor time not idle over ``look_s`` seconds, including time taken by a
    hypervisor (steal); None if the kernel does not report it.
    """
    before = _times(stat)
    sleep(look_s)
    after = _times(stat)
    if before is None or after is None:
        return None
    total, idle = after[0] - before[0], after[1] - before[1]
    return None if total <= 0 else min(1.0, max(0.0, 1.0 - idle / total))


def _times(stat: Path) -> tuple[int, int] | None:
    """(all ticks, ticks idle or waiting for a disk) since boot."""
    try:
        # guest time is in user time already
        words = stat.read_text().split("\n", 1)[0].split()[1:9]
        ticks = [int(word) for word in words]
    except (OSError, ValueError):
        return None
    return (sum(ticks), ticks[3] + ticks[4]) if len(ticks) >= 5 else None
