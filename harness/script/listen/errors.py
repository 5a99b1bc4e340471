"""Finds the error of a Python program in its output that tells why it failed: launchers print much
behind it, and a kill makes others fail first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

SHOWN = 4
_PREFIX = r"(?:\[[\w.-]+\]:\s?)?"
"""Of launchers that say which rank prints."""
_RAISED = re.compile(
    rf"{_PREFIX}(?P<error>(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Failure|Timeout))"
    r"(?::.*|$))"
)
_INSIDE = re.compile(rf"{_PREFIX}(?:\s+\S|Traceback \()")
_PLACE = re.compile(rf'{_PREFIX}\s+File "')
_OF_LAUNCHERS = re.compile(r"ChildFailedError|CalledProcessError|SignalException")
"""What a launcher raises because a rank has failed."""
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
"""Differs where the same error is raised again: a port, a pid, an address, a rank."""


def telling_error(lines: Sequence[str]) -> tuple[list[str], int]:
    """The last lines of a traceback, its error last, and how often it was raised: the first that
    was raised most often, as a job fails of what each restart meets again, and what was raised
    once may be an echo of the kill. ([], 0) if there is none. What a launcher raises because a rank
    failed is none.
    """
    found = list(_raised(lines))
    times = Counter(key for key, _ in found)
    most = max(times.values(), default=0)
    shown = next((traceback for key, traceback in found if times[key] == most), [])
    return shown, most


def _raised(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each error, without what varies, and the last lines of its traceback."""
    for index, line in enumerate(lines):
        raised = _RAISED.match(line)
        if raised is None or _OF_LAUNCHERS.search(raised["name"]):
            continue
        start = index
        while start > 0 and _INSIDE.match(lines[start - 1]):
            start -= 1
        if any(_PLACE.match(one) for one in lines[start:index]):
            shown = list(lines[max(start, index - SHOWN + 1) : index + 1])
            yield _VARIES.sub("#", raised["error"]), shown
