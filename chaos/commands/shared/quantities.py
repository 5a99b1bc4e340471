"""Types of the values that options are given: times, sizes, shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import click

LONGEST_S = 100 * 365 * 86_400.0
MOST_BYTES = 10**18


class Finite(click.FloatRange):
    """A number within bounds: neither infinite nor none at all, which compares with no bound."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """As in the base. Fails for infinity and NaN."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Parsed(click.ParamType):
    """What ``read`` makes of a text. Its ValueError says what is wrong with the text."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A default that is no text stays as it is."""
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def span(*, positive: bool = False, most_s: float = LONGEST_S) -> Parsed:
    """A duration: ``90s``, ``4h``; its value in seconds. ``positive``: longer than nothing."""
    return Parsed("duration", partial(_seconds, positive=positive, most_s=most_s))


def _seconds(text: str, *, positive: bool = False, most_s: float = LONGEST_S) -> float:
    from trainchaos.chaos.scenario.sla import parse_duration

    seconds = parse_duration(text)
    if positive and not seconds > 0:
        raise ValueError(f"{text} is no time: write more than 0s")
    if seconds > most_s:
        most = "a hundred years" if most_s == LONGEST_S else f"{most_s:g} s"
        raise ValueError(f"{text} is longer than {most}")
    return seconds


def _bytes(text: str) -> int:
    from trainchaos.chaos.scenario.workload import size_bytes

    size = size_bytes(text)
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"{text} is not between 1B and 1000000TB")
    return size


def _bytes_per_s(text: str) -> int:
    if not text.endswith("/s"):
        raise ValueError(f"{text!r} is not a size a second, such as 40GB/s")
    return _bytes(text.removesuffix("/s"))


def _stall(text: str) -> tuple[str, float]:
    name, _, duration = text.partition("=")
    if not duration:
        raise ValueError(f"{text!r} is not STRATEGY=DURATION, such as hot-spare=20s")
    return name, _seconds(duration)


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers, such as 0.96,0.04") from None
    if not all(each >= 0 for each in shares) or abs(sum(shares) - 1.0) > 1e-9:
        raise ValueError(f"{text} are no probabilities that sum to 1")
    return shares


def _cause(text: str) -> tuple[str, float | None, float | None]:
    name, _, rest = text.partition("=")
    share, colon, duration = rest.partition(":")
    if name and not share and colon:
        return name, None, _seconds(duration)
    number = _number(share)
    if not name or not 0 < number <= 1:
        raise ValueError(f"{text!r} is not NAME=SHARE:DURATION, such as hardware=0.6:6m")
    return name, number, _seconds(duration) if colon else None


def _lemons(text: str) -> tuple[float, float]:
    share, times = map(_number, text.partition(":")[::2])
    if not (0 <= share <= 1 and 0 < times <= 1e6):
        raise ValueError(f"{text!r} is not SHARE:TIMES, such as 0.05:10")
    return share, times


def _number(text: str) -> float:
    """NaN, which is within no bounds, for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


SIZE = Parsed("size", _bytes)
"""``4TB``, ``512MiB``; in bytes."""
SIZE_PER_S = Parsed("size/s", _bytes_per_s)
"""``40GB/s``; in bytes."""
STALL = Parsed("strategy=duration", _stall)
"""``hot-spare=20s``: how long a strategy's recovery takes, without work done again."""
SHARES = Parsed("probabilities", _shares)
"""``0.96,0.03,0.01``: probabilities that sum to 1."""
CAUSE_SHARE = Parsed("name=share[:duration]", _cause)
"""``hardware=0.6:6m``, ``hardware=0.6`` or ``hardware=:6m``: a cause's share of the failures, and
the seconds that a recovery from it takes, of which one may be None.
"""
LEMON_SHARE = Parsed("share:times", _lemons)
"""``0.05:10``: a twentieth of the nodes fails ten times as often."""
