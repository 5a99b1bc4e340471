"""Finds the first error of a Python program in its output: launchers print much behind it."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHOWN = 4
_PREFIX = r"(?:\[[\w.-]+\]:\s?)?"
"""Of launchers that say which rank prints."""
_RAISED = re.compile(
    rf"{_PREFIX}(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Failure|Timeout))(?::|$)"
)
_INSIDE = re.compile(rf"{_PREFIX}(?:\s+\S|Traceback \()")
_PLACE = re.compile(rf'{_PREFIX}\s+File "')
_OF_LAUNCHERS = re.compile(r"ChildFailedError|CalledProcessError|SignalException")
"""What a launcher raises because a rank has failed."""


def first_error(lines: Sequence[str]) -> list[str]:
    """The last lines of the first traceback, its error last; empty if there is none. What was
    raised by a launcher because a rank failed is none.
    """
    for index, line in enumerate(lines):
        raised = _RAISED.match(line)
        if raised is None or _OF_LAUNCHERS.search(raised["name"]):
            continue
        start = index
        while start > 0 and _INSIDE.match(lines[start - 1]):
            start -= 1
        if any(_PLACE.match(one) for one in lines[start:index]):
            return list(lines[max(start, index - SHOWN + 1) : index + 1])
    return []
