"""Processor hogs: four processes on two processors, which they share with whatever the test starts
beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

HOGS = 4
PROCESSORS = 2
URGENCIES = {"as-urgent": 0, "niced": 19}
BURN = """\
import os, sys, time
os.nice(int(sys.argv[1]))
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end and os.getppid() == int(sys.argv[3]): sum(range(100000))
"""
"""Ends with whoever started it, and after a while by itself."""


@contextmanager
def hogs(nice: int = 0, at_most_s: float = 1200.0) -> Iterator[list[int]]:
    """Pids of processes that use all that they get of two processors. This thread, and so whatever
    it starts meanwhile, has the same two, however many the machine has: on eight of them four hogs
    would be in nobody's way.
    """
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, sorted(before)[:PROCESSORS])
        started = []
        for _ in range(HOGS):
            told = map(str, (nice, at_most_s, os.getpid()))
            hog = subprocess.Popen([sys.executable, "-c", BURN, *told])
            stack.callback(hog.wait, timeout=120)
            stack.callback(hog.kill)
            started.append(hog.pid)
        yield started
