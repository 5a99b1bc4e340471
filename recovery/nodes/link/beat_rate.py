"""How often an agent reports the marks of its ranks, and is pinged: the more nodes, the less often,
so that the coordinator's time for all of them is bounded.
"""

from __future__ import annotations

LEAST_S = 0.05
"""Between two reports with changes, where the nodes are few."""
QUIET = 2
"""As many times as long where nothing has changed."""
MOST_A_SECOND = 10_000
"""Reports of all nodes together. One takes the coordinator about 30 µs, and eight ranks' marks in
it (docs/control-plane.md): all of them a third of a processor, from 500 nodes on.
"""


MOST_PINGS_A_SECOND = 4096
"""Of all nodes together. A ping and its answer take the coordinator about 60 µs: all of them a
quarter of a processor, from as many nodes on.
"""


def ping_s(nodes: int) -> float:
    """Seconds between two pings of one of so many nodes."""
    return max(1.0, nodes / MOST_PINGS_A_SECOND)


def beat_s(nodes: int) -> float:
    """Seconds between two reports of one of so many nodes."""
    return max(LEAST_S, nodes / MOST_A_SECOND)


def late_s(beat_s: float) -> float:
    """By how many seconds more than with few nodes a report may lag behind, with ``beat_s`` between
    two; with few nodes 0.
    """
    return QUIET * max(0.0, beat_s - LEAST_S)
