"""Counts the open files of the test process."""

from __future__ import annotations

import gc
import os
import threading

from tests.support.running import LIMIT_S
from trainchaos.recovery.collectives.group import LEAVING


def open_files() -> int:
    """Open files of this process, without those that earlier tests left to the collector, or to a
    thread that leaves a group, which would be closed at any time.
    """
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == LEAVING:
            thread.join(LIMIT_S)
    return len(os.listdir("/proc/self/fd"))
