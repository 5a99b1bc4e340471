"""Kills a stopped process a moment later, once it has been read from outside. Nobody waits: the
process counts as dead meanwhile, and is killed at once if it goes on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LIMIT_S = 0.3
"""For the look; it took 0.07 to 0.12 s on a loaded machine
(``recovery.process.outside_stacks``).
"""
EVERY_S = 0.005
"""Between two questions whether it is still stopped."""


def kill_after(
    pidfd: int,
    looks: Callable[[], bool],
    *,
    now_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> threading.Thread:
    """Kill a process as soon as ``looks`` is not true any more, or LIMIT_S is over, on a thread
    that is returned. ``pidfd``: of the process; a copy is held.
    """
    held = os.dup(pidfd)

    def kill() -> None:
        until_s = now_s() + LIMIT_S
        while looks() and now_s() < until_s:
            pause(EVERY_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(held, signal.SIGKILL)
        os.close(held)

    thread = threading.Thread(target=kill, name="last look", daemon=True)
    thread.start()
    return thread
