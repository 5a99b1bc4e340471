"""Parses numbers as programs print them, from a group of a regular expression or a word of the
beacon.

A loss is read from ``4.47``, ``4.47,``, ``tensor(4.47, device='cuda:0')``, ``np.float32(4.47)``,
``'nan'``, ``-nan(ind)``, ``1,234.5``. ``4,47`` is not read: it may be 4.47 or two numbers. Neither
are two values, a percentage, or a number with its unit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

TEXT_LIMIT = 400
SHOWN = 40  # characters kept of an unreadable text
# Lightning pads a number in its bar: nan.0
_NAN = r"[+-]?(?:nan(?:\((?:ind|snan)\)|\.0*)?|1\.\#(?:qnan|snan|ind))"
_INF = r"(?P<sign>[+-]?)(?:inf(?:inity|\.0*)?|1\.\#inf)"
_PLAIN = r"[+-]?(?:\d{1,3}(?:,\d{3})+\.\d*|\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_BEFORE = r"[\s'\"\[(]*(?:[a-z_][\w.]*\()?[\s'\"\[(]*"
_AFTER = r"(?:[\s,;:.|)\]}'\"]*|,\s*[a-z_]\w*=.*)"
_REAL = re.compile(
    rf"{_BEFORE}(?:(?P<nan>{_NAN})|(?P<inf>{_INF})|(?P<plain>{_PLAIN})){_AFTER}",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_WHOLE = re.compile(
    r"[\s'\"\[(]*(?:(\d[\d,_]*?)(?:\.0*)?|(?P<power>\d(?:\.\d+)?e\+\d\d?))(?:/\d+)?"
    r"[\s,;:.|)\]}'\"]*",
    re.ASCII | re.IGNORECASE,
)
MOST_DIGITS = 19


@dataclass(frozen=True, kw_only=True)
class ParsedNumber:
    """``value``: None if there is none; ``unread``: the text that was not a number, empty if there
    was none.
    """

    value: float | None = None
    unread: str = ""


def real(text: str | None) -> ParsedNumber:
    """Parse a loss. None or an empty text gives an empty result."""
    if text is None or not text.strip():
        return ParsedNumber()
    found = _REAL.fullmatch(text.strip()) if len(text) <= TEXT_LIMIT else None
    if found is None:
        return ParsedNumber(unread=text.strip()[:SHOWN])
    if found["nan"]:
        return ParsedNumber(value=math.nan)
    if found["inf"]:
        return ParsedNumber(value=-math.inf if found["sign"] == "-" else math.inf)
    return ParsedNumber(value=float(found["plain"].replace(",", "").replace("_", "")))


def whole(text: str | None, limit: int) -> int | None:
    """A count below ``limit``: ``12``, ``1,200``, ``[12]``, ``12/100`` (the first), ``12.0``,
    ``2e+3``; otherwise None.
    """
    found = _WHOLE.fullmatch(text[:TEXT_LIMIT].strip()) if text else None
    if found and found["power"]:
        power = float(found["power"])
        return int(power) if power == int(power) < limit else None
    digits = re.sub("[,_]", "", found[1]) if found else ""
    if not digits or len(digits) > MOST_DIGITS:
        return None
    value = int(digits)
    return value if value < limit else None


def in_json(value: float | None) -> float | str | None:
    """A number in JSON; non-finite values as text."""
    return repr(value) if value is not None and not math.isfinite(value) else value
