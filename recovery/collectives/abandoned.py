"""Destroys process groups on separate threads: a group abandoned in the middle of an operation,
once that has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from trainchaos.recovery.collectives.circle import Circle

LOOK_EVERY_S = 1.0
GRACE_S = 5.0
END_S = 5.0  # longest wait for those threads as the process ends
STARTING_S = 0.001  # between looks at a thread that is being started
LEAVING = "leave-group"  # the threads that take groups down
ABORTING = "abort-group"  # the threads that break communicators of NCCL
ABANDONED = "abandoned-group"  # the threads that wait for it


def outlive(work: dist.Work, circles: Sequence[Circle], made: list[Any], *, limit_s: float) -> None:
    """Hold torch's groups, ``made``, until ``work`` has ended, and then release them, on a thread
    of its own: an earlier release would join the thread that waits. ``limit_s``: the operation's
    own timeout; an operation that outlives it is held for ever.
    """

    def hold() -> None:
        deadline_s = time.monotonic() + limit_s + GRACE_S
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
                return
            time.sleep(LOOK_EVERY_S)
        threading.current_thread().name = LEAVING
        for circle in circles:
            circle.close()
        made.clear()

    threading.Thread(target=hold, name=ABANDONED, daemon=True).start()


@atexit.register
def _await_leaving() -> None:
    """A thread that returns from gloo or NCCL after the interpreter has ended aborts the
    process.
    """
    deadline_s = time.monotonic() + END_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        threads = [one for one in threading.enumerate() if one.name in (LEAVING, ABORTING)]
        if not threads:
            return
        try:
            threads[0].join(left_s)
        except RuntimeError:  # another thread is about to start it
            time.sleep(STARTING_S)
