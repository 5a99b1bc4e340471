"""Takes down a process group that was abandoned in the middle of an operation, once the operation
has ended.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from recovery.collectives.circle import Circle

LOOK_EVERY_S = 1.0
GRACE_S = 5.0
ABANDONED = "abandoned-group"  # the threads that wait for it


def outlive(
    work: dist.Work, circles: Sequence[Circle], made: list[Any], *, limit_s: float, then: str
) -> None:
    """Hold torch's groups, ``made``, until ``work`` has ended, and then let go of them, on a thread
    of its own: before, destroying them would join the thread that waits. ``limit_s``: the
    operation's own timeout; one that it does not end is held for ever. ``then``: the thread's name
    while it takes them down.
    """

    def hold() -> None:
        deadline_s = time.monotonic() + limit_s + GRACE_S
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
                return
            time.sleep(LOOK_EVERY_S)
        threading.current_thread().name = then
        for circle in circles:
            circle.close()
        made.clear()

    threading.Thread(target=hold, name=ABANDONED, daemon=True).start()
