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
FIRST_PINGS, FIRST_EVERY_NS = 8, 20_000_000
"""To measure the node's clock."""
_SPREAD = 0.6180339887498949
"""The fractional parts of n times the golden ratio are spread evenly, whatever nodes there are
(Knuth, The Art of Computer Programming 3, 6.4, theorem S).
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


def next_ping_ns(node: int, pings: int, now_ns: int, every_ns: int = 1_000_000_000) -> int:
    """When a node is pinged again that is pinged now, for the ``pings``-th time: at most
    ``every_ns`` from now, as its agent expects a message within that time, and at a moment of its
    own. If the next ping was due a second after the last one, a coordinator that was held up once
    would send the pings of all nodes in the same moment from then on, and get all answers at once.
    """
    if pings < FIRST_PINGS:
        return now_ns + FIRST_EVERY_NS
    own_ns = int(node * _SPREAD % 1.0 * every_ns)
    return now_ns + every_ns - (now_ns - own_ns) % every_ns
