"""What an act costs, in what a slow machine does not change: a count of calls, or the processor
time of one act by that of another in the same run.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable
from types import FrameType

TRIES = 20


def calls(act: Callable[[], object]) -> int:
    """Functions that it calls on this thread, of Python and of C."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return counted - 1  # the call that ends it


def times_as_long(large: Callable[[], object], small: Callable[[], object], enough: float) -> float:
    """Processor time of ``large`` by that of ``small``: of the best of several of each, in turn. Of
    three; of more while it is not below ``enough``, as others use the processors too.
    """
    best = [math.inf, math.inf]
    for number in range(TRIES):
        for place, act in enumerate((large, small)):
            best[place] = min(best[place], processor_s(act))
        if number >= 2 and best[0] < enough * best[1]:
            break
    return best[0] / best[1]


def processor_s(act: Callable[[], object]) -> float:
    """Processor time of this thread; garbage of other tests is none of it. No figure to hold
    against seconds: only against that of another act.
    """
    gc.disable()
    try:
        began_s = time.thread_time()
        act()
        return time.thread_time() - began_s
    finally:
        gc.enable()
