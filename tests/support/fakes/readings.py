"""Readings of a machine's processors for logs that are made up: a share of the time in which each
rank runs, and one in which it stands in a run queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

NS = 1_000_000_000
EVERY_NS = 400_000_000
CPUS = 4

Load = Callable[[int], tuple[float, float]]
"""Time -> (share in which a rank runs, share in which it waits for a processor)."""


def steady(ran: float, queued: float) -> Load:
    """Always the same."""
    return lambda _: (ran, queued)


def until(time_ns: int, before: Load, after: Load) -> Load:
    """One load up to a time, another from then on."""
    return lambda now: before(now) if now < time_ns else after(now)


def readings(
    start_ns: int, end_ns: int, members: Sequence[str], load: Load, *, every_ns: int = EVERY_NS
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(time, data) of ``pressure_read`` events from one time to another."""
    ran = queued = some = 0.0
    now, last = start_ns, start_ns
    while now <= end_ns:
        for at in range(last, now, NS // 100):  # a load may change in between
            share_ran, share_queued = load(at)
            seconds = min(NS // 100, now - at) / NS
            ran, queued = ran + share_ran * seconds, queued + share_queued * seconds
            some += (share_queued > 0) * seconds
        counts = [round(ran, 4), round(queued, 4)]
        data = {
            "cpus": CPUS,
            "some_s": some,
            "steal_s": 0.0,
            "ranks": {name: list(counts) for name in members},
        }
        yield now, data
        last, now = now, now + every_ns
