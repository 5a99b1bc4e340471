"""How busy other programs keep this machine: while a run gets ready, and in each of its arms."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from trainchaos.chaos.planning.crowd import HERE
from trainchaos.chaos.scenario.model import Scenario

LEAST_S = 0.1
"""From a shorter time nothing is concluded: the kernel counts in hundredths of a second."""
ARM_LEAST_S = 0.5
"""The same for an arm, in which the kernel has many processes to count."""
WORTH_SAYING = 0.25
"""Share of the processors used by others from which on a run says so: half of one processor of two.
A choice: the services of an idle machine use less, one busy process more.
"""
BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat that are work of this machine: user, nice, system, interrupts, and what the
hypervisor took (proc(5)).
"""


OWN = ("local", "agents")
"""Launchers whose ranks descend from this process, so that their time is known from that of others;
those in containers descend from the engine.
"""


def family_s(proc: Path = Path("/proc")) -> float:
    """Processor time of this process, its descendants that live, and those that it or they have
    reaped, seconds. Without ``children`` files (proc(5), CONFIG_PROC_CHILDREN): of this process and
    those it has reaped.
    """
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    total_s = time.process_time() + reaped.ru_utime + reaped.ru_stime
    ticks, left = os.sysconf("SC_CLK_TCK"), _children(proc / "self")
    while left:
        one = proc / str(left.pop())
        try:
            fields = (one / "stat").read_text(errors="replace").rpartition(")")[2].split()
            total_s += sum(int(word) for word in fields[11:15]) / ticks
        except (OSError, ValueError):  # it has just ended
            continue
        left += _children(one)
    return total_s


def _children(process: Path) -> list[int]:
    """Of all its threads, of which any may end meanwhile."""
    found: list[int] = []
    try:
        threads = list((process / "task").iterdir())
    except OSError:
        return found
    for thread in threads:
        with suppress(OSError, ValueError):
            found += [int(word) for word in (thread / "children").read_text().split()]
    return found


class OthersLoad:
    """Measures from when it is made. ``stat``: the kernel's counters; ``own_s``: processor time
    that is not that of others; ``now_s``: a clock.
    """

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        own_s: Callable[[], float] = family_s,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stat, self._own_s, self._now_s = stat, own_s, now_s
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._began = self._read()

    def share(self, cores: int, *, least_s: float = LEAST_S) -> float | None:
        """Share of ``cores`` processors that other programs have used since then; None if that is
        not known, or less than ``least_s`` seconds have passed.
        """
        began, ended = self._began, self._read()
        if began is None or ended is None or ended[0] - began[0] < least_s or cores < 1:
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
    """Words if other programs use much of this machine, on which ranks are about to train."""
    here = any(scenario.launcher.kind in HERE for scenario in scenarios)
    if not here or share is None or share < WORTH_SAYING:
        return ""
    return (
        f"other programs used {used(share * cores, cores)} as it began: its times are those of a"
        " busy machine"
    )


def used(others: float, cores: int) -> str:
    """For people: ``1.2 of 2 cores``."""
    return f"{others:.1f} of {cores} {'core' if cores == 1 else 'cores'}"
