"""How busy other processes keep this machine, measured while a run gets ready."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from trainchaos.chaos.planning.crowd import HERE
from trainchaos.chaos.scenario.model import Scenario

LEAST_S = 0.1
"""From a shorter time nothing is concluded: the kernel counts in hundredths of a second."""
WORTH_SAYING = 0.25
"""Share of the processors used by others from which on a run says so: half of one processor of two.
A choice: the services of an idle machine use less, one busy process more.
"""
BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat that are work of this machine: user, nice, system, interrupts, and what the
hypervisor took (proc(5)).
"""


class OthersLoad:
    """Measures from when it is made. ``stat``: the kernel's counters; ``own_s``: processor time of
    this process; ``now_s``: a clock.
    """

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        own_s: Callable[[], float] = time.process_time,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stat, self._own_s, self._now_s = stat, own_s, now_s
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._began = self._read()

    def share(self, cores: int) -> float | None:
        """Share of ``cores`` processors that other processes have used since then; None if that is
        not known.
        """
        began, ended = self._began, self._read()
        if began is None or ended is None or ended[0] - began[0] < LEAST_S or cores < 1:
            return None
        elapsed_s, used_s, own_s = (b - a for a, b in zip(began, ended, strict=True))
        return min(1.0, max(0.0, used_s - own_s) / elapsed_s / cores)

    def _read(self) -> tuple[float, float, float] | None:
        try:
            words = self._stat.read_text().split("\n", 1)[0].split()[1:]
            used_s = sum(int(words[column]) for column in BUSY) / self._ticks
        except (OSError, ValueError, IndexError):  # another kernel, or a container that hides it
            return None
        return self._now_s(), used_s, self._own_s()


def busy_words(scenarios: Iterable[Scenario], share: float | None, cores: int) -> str:
    """Words if other processes use much of this machine, on which ranks are about to train."""
    here = any(scenario.launcher.kind in HERE for scenario in scenarios)
    if not here or share is None or share < WORTH_SAYING:
        return ""
    of = f"{cores} {'core' if cores == 1 else 'cores'}"
    return (
        f"other processes used {share * cores:.1f} of {of} as it began: its times are those of a"
        " busy machine"
    )
