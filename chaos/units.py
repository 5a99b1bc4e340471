"""Numbers, ranges, times and values as text for people: three significant digits, never rounded in
our favour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from typing import Any
from unicodedata import category

MISSING = "–"
NEVER = "never"
COUNT_UNITS = frozenset(
    {"steps", "samples", "ranks", "count", "alarms", "bytes", "replicas", "saves"}
)
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of characters that are neither visible nor spaces."""
_ROUNDING = {"lower": ROUND_CEILING, "higher": ROUND_FLOOR, "neither": ROUND_HALF_EVEN}


def number(
    value: float | None,
    better: str = "neither",
    finest: float = 0.0,
    decimals: int | None = None,
) -> str:
    """Three significant digits, none finer than ``finest``; or that many ``decimals``. Infinity is
    "never".

    ``better`` rounds against us: a time up, a goodput down.
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return NEVER if value > 0 else "−∞"
    # Nine digits first, or the noise of binary fractions (0.1 + 0.2) would round 0.3 up to 0.301.
    exact = Decimal(f"{value:.8e}")
    if decimals is not None:
        step = Decimal(1).scaleb(-decimals)
        return f"{exact.quantize(step, rounding=_ROUNDING[better]) + 0:,f}"
    if value == 0:
        return "0"
    if finest and abs(value) < finest:
        return f"<{finest:g}"
    quantum = max(Decimal(1).scaleb(exact.adjusted() - 2), Decimal(str(finest)))
    rounded = exact.quantize(quantum, rounding=_ROUNDING[better])
    if rounded.adjusted() > exact.adjusted():
        rounded = rounded.quantize(quantum.scaleb(1))
    if abs(rounded) < Decimal("1e-6") or abs(rounded) >= Decimal("1e9"):
        return f"{rounded:.2e}"
    return f"{rounded:f}" if rounded.adjusted() < 2 else f"{int(rounded)}"


def quantity(value: float | None, unit: str, better: str = "neither") -> str:
    """A value without its unit; whole counts are exact, everything else has three significant
    digits.
    """
    if (
        value is not None
        and unit in COUNT_UNITS
        and math.isfinite(value)
        and float(value).is_integer()
    ):
        return str(int(value))
    return number(value, better)


def counted(given: int, of: int | None) -> str:
    """Number of values: ``3``, or ``2 of 3`` if fewer values exist than could. ``of`` None:
    unknown.
    """
    return str(given) if of is None or given >= of else f"{given} of {of}"


def with_unit(value: float | None, unit: str, better: str = "neither") -> str:
    """A value with its unit; "never" and a missing value carry none."""
    text = quantity(value, unit, better)
    return text if text in (MISSING, NEVER) or unit in ("", "1", "ratio") else f"{text} {unit}"


def enclosing(
    low: float | None, high: float | None, unit: str = "ratio", decimals: int | None = None
) -> tuple[str, str]:
    """The ends of a range as text, without their unit: the lower one rounded down, the upper one
    up, so that the range as shown encloses all values.
    """
    if decimals is not None:
        return number(low, "higher", decimals=decimals), number(high, "lower", decimals=decimals)
    return quantity(low, unit, "higher"), quantity(high, unit, "lower")


def interval(
    ends: tuple[float | None, float | None] | None,
    unit: str = "ratio",
    decimals: int | None = None,
) -> str:
    """``[low, high]`` of a range, see ``enclosing``; "" if there is none."""
    return "[{}, {}]".format(*enclosing(*ends, unit, decimals)) if ends is not None else ""


def percent(ratio: float) -> str:
    """A ratio as a percentage with at most three significant digits."""
    return f"{number(ratio * 100)} %"


def percents(low: float, high: float) -> str:
    """Ratios from ``low`` to ``high`` as percentages: ``93.1 % to 95 %``, or one that all are."""
    if percent(low) == percent(high):
        return percent(low)
    return "{} % to {} %".format(*enclosing(low * 100, high * 100))


def span(seconds: float) -> str:
    """A time for people: ``45 s``, ``12.5 min``, ``3.1 h``, ``2.0 d``."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def plural(count: int, noun: str) -> str:
    """``1 arm``, ``2 arms``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *before, last = words or ("",)
    return f"{', '.join(before)} and {last}" if before else last


def scalar(value: Any) -> str:
    """Any JSON value as short text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return ", ".join(scalar(v) for v in value)
    return MISSING if value is None else str(value)


def pairs(data: dict[str, Any]) -> str:
    """A small dictionary as ``key value · key value``."""
    return " · ".join(f"{key} {scalar(value)}" for key, value in data.items())


def flatten(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested dictionaries as dotted names with short texts."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", scalar(value)))
    return rows


def visible(text: str) -> str:
    """Text with control characters, including bidirectional ones, spelt out; line feeds, tabs and
    spaces stay. Names come from YAML and logs, and their escape sequences must not reach a terminal
    or a page.
    """
    unseen = {
        ord(c): ascii(c)[1:-1] for c in set(text) if c not in "\n\t" and category(c) in UNSEEN
    }
    return text.translate(unseen) if unseen else text
