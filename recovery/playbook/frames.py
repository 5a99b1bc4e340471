"""Puts beside an exception where it was raised: its words may mean something else elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

AT = "  <- "
"""Between an exception and its place; not shown."""
MOST = 300  # characters of the place
_BEGINS = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^(?:\[rank ?\d{1,7}\]:|\d{1,7}:|\([^()]{1,80}\)) ?")
"""Of torch, srun and Ray, which name who says a line."""


def framed(lines: Iterable[str]) -> Iterator[str]:
    """Each line; one that ends a traceback has its innermost frame at its end."""
    inside, frame = False, ""
    for line in lines:
        bare = _PREFIX.sub("", line) if inside else line
        if _BEGINS in line:
            inside, frame = True, ""
        elif inside and bare[:1] in (" ", "\t", ""):
            said = bare.strip()
            frame = said if said.startswith("File ") else f"{frame} {said}"
        elif inside:
            inside = False
            yield f"{line.rstrip()}{AT}{frame[-MOST:]}" if frame else line
            continue
        yield line
