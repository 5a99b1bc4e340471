"""When each node is pinged: at first often, to measure its clock, then once a second (of thousands
of nodes less often), at a moment of the second that is its own.

If the next ping was due a second after the last one, a coordinator that was held up once would send
the pings of all nodes in the same moment from then on, and get all answers in the same moment.
"""

from __future__ import annotations

EVERY_NS = 1_000_000_000
FIRST, FIRST_EVERY_NS = 8, 20_000_000
_SPREAD = 0.6180339887498949
"""The fractional parts of n times the golden ratio are spread evenly, whatever nodes there are
(Knuth, The Art of Computer Programming 3, 6.4, theorem S).
"""


def next_ns(node: int, pings: int, now_ns: int, every_ns: int = EVERY_NS) -> int:
    """When a node is pinged again that is pinged now, for the ``pings``-th time. At most
    ``every_ns`` from now: its agent expects a message within that time.
    """
    if pings < FIRST:
        return now_ns + FIRST_EVERY_NS
    own_ns = int(node * _SPREAD % 1.0 * every_ns)
    return now_ns + every_ns - (now_ns - own_ns) % every_ns
