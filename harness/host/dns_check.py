"""How long the name server takes to say that an address of this machine has no name.

Torch's store asks for it with every connection. What is built in does not wait
(``recovery.transport.reverse_dns``); a stack or a script that makes its own connections does, and
its recovery is longer by that, whatever its makers did.
"""

from __future__ import annotations

import socket
import threading
import time

ADDRESS = "::ffff:127.0.0.1"  # the loopback address as torch's store connects to it
TRIES = 100  # one lost answer costs seconds, and one in a hundred is enough to spoil a comparison
LIMIT_S = 3.0
SLOW_S = 0.1
REMEDY = f"put the line '{ADDRESS} localhost' into /etc/hosts"


def slowest_lookup_s(*, tries: int = TRIES, limit_s: float = LIMIT_S) -> float:
    """The longest of ``tries`` look-ups, or of those that were done within ``limit_s``; one under
    way counts.
    """
    took, since = [0.0], [time.monotonic()]

    def look() -> None:
        for _ in range(tries):
            since[0] = time.monotonic()
            try:
                socket.getnameinfo((ADDRESS, 0), socket.NI_NUMERICSERV)
            except OSError:
                pass  # no answer is what takes long
            took[0] = max(took[0], time.monotonic() - since[0])

    looking = threading.Thread(target=look, name="names", daemon=True)
    looking.start()
    looking.join(limit_s)
    return max(took[0], time.monotonic() - since[0]) if looking.is_alive() else took[0]


def caution(slowest_s: float) -> str | None:
    """What to say of a comparison that was made with such a name server; None where nothing is to
    be said.
    """
    if slowest_s <= SLOW_S:
        return None
    return (
        f"the name server took {slowest_s:.2g} s or more to say that {ADDRESS} has no name. Torch's"
        " store asks for that with every connection, so recoveries of stacks that are not built in"
        f" may be that much longer than they need be: {REMEDY} and compare again"
    )
