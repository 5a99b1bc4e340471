"""Measures how long the name server takes to answer that an address of this machine has no name.

Torch's store makes this query for every connection. Built-in code does not wait for it
(``recovery.transport.reverse_dns``); a stack or script that makes its own connections does, which
lengthens its recovery through no fault of its own.
"""

from __future__ import annotations

import socket
import threading
import time

ADDRESS = "::ffff:127.0.0.1"  # the loopback address in the form that torch's store uses
TRIES = 100  # one lost answer costs seconds, and one in a hundred can spoil a comparison
LIMIT_S = 3.0
SLOW_S = 0.1
REMEDY = f"put the line '{ADDRESS} localhost' into /etc/hosts"


def slowest_lookup_s(*, tries: int = TRIES, limit_s: float = LIMIT_S) -> float:
    """The longest of ``tries`` look-ups, or of those done within ``limit_s``; an unfinished one
    counts.
    """
    took, since = [0.0], [time.monotonic()]

    def look() -> None:
        for _ in range(tries):
            since[0] = time.monotonic()
            try:
                socket.getnameinfo((ADDRESS, 0), socket.NI_NUMERICSERV)
            except OSError:
                pass  # a missing answer is the slow case
            took[0] = max(took[0], time.monotonic() - since[0])

    looking = threading.Thread(target=look, name="names", daemon=True)
    looking.start()
    looking.join(limit_s)
    return max(took[0], time.monotonic() - since[0]) if looking.is_alive() else took[0]


def caution(slowest_s: float) -> str | None:
    """A caution for comparisons made with a slow name server; None if it is fast enough."""
    if slowest_s <= SLOW_S:
        return None
    return (
        f"the name server took {slowest_s:.2g} s or more to say that {ADDRESS} has no name. Torch's"
        " store asks for that with every connection, so recoveries of stacks that are not built in"
        f" may be that much longer than they need be: {REMEDY} and compare again"
    )
