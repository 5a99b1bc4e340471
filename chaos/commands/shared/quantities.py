"""Types of the values that ``chaos project`` is given: times, sizes, shares."""

from __future__ import annotations

import math
from typing import Any

import click

LONGEST_S = 100 * 365 * 86_400.0
MOST_BYTES = 10**18


class Finite(click.FloatRange):
    """A number within bounds: neither infinite nor none at all, which compares with no bound."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number. Fails at anything else."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


class Span(click.ParamType):
    """A duration: ``90s``, ``4h``; its value in seconds. ``positive``: longer than nothing. None
    is longer than a hundred years.
    """

    name = "duration"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds. Fails at anything else."""
        from trainchaos.chaos.scenario.sla import ClauseError, parse_duration

        try:
            seconds = parse_duration(value)
        except ClauseError as error:
            self.fail(str(error), param, ctx)
        if self._positive and not seconds > 0:
            self.fail(f"{value} is no time: write more than 0s", param, ctx)
        if seconds > LONGEST_S:
            self.fail(f"{value} is longer than a hundred years", param, ctx)
        return seconds


class Bytes(click.ParamType):
    """A size: ``4TB``, ``512MiB``; its value in bytes. ``rate``: of each second, as ``40GB/s``."""

    name = "size"

    def __init__(self, *, rate: bool = False) -> None:
        self._rate = rate
        self.name = "size/s" if rate else "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes, more than none. Fails at anything else."""
        from trainchaos.chaos.scenario.workload import size_bytes

        text = str(value)
        if self._rate and not text.endswith("/s"):
            self.fail(f"{value!r} is not a size a second, such as 40GB/s", param, ctx)
        try:
            found = size_bytes(text.removesuffix("/s") if self._rate else text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not 0 < found <= MOST_BYTES:
            self.fail(f"{value} is not between 1B and 1000000TB", param, ctx)
        return found


class Stall(click.ParamType):
    """``hot-spare=20s``: how long a strategy's recovery takes, without work done again."""

    name = "strategy=duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        """The name and seconds. Fails at anything else."""
        if isinstance(value, tuple):
            return value
        name, _, text = str(value).partition("=")
        if not text:
            self.fail(f"{value!r} is not STRATEGY=DURATION, such as hot-spare=20s", param, ctx)
        return name, Span().convert(text, param, ctx)


class Shares(click.ParamType):
    """``0.96,0.03,0.01``: probabilities that sum to 1."""

    name = "probabilities"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Fails unless they are, and sum to 1."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 0.96,0.04", param, ctx)
        if not all(one >= 0 for one in found) or abs(sum(found) - 1.0) > 1e-9:
            self.fail(f"{value} are no probabilities that sum to 1", param, ctx)
        return found


class CauseShare(click.ParamType):
    """``hardware=0.6:6m``, ``hardware=0.6`` or ``hardware=:6m``: a cause's share of the failures,
    and what a recovery from it takes.
    """

    name = "name=share[:duration]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float | None, float | None]:
        """The name, the share and seconds, of which one may be None. Fails at anything else."""
        if isinstance(value, tuple):
            return value
        name, _, rest = str(value).partition("=")
        share, colon, text = rest.partition(":")
        number = _number(share)
        if name and not share and colon:
            return name, None, Span().convert(text, param, ctx)
        if not name or number is None or not 0 < number <= 1:
            self.fail(f"{value!r} is not NAME=SHARE:DURATION, such as hardware=0.6:6m", param, ctx)
        return name, number, Span().convert(text, param, ctx) if colon else None


class LemonShare(click.ParamType):
    """``0.05:10``: a twentieth of the nodes fails ten times as often."""

    name = "share:times"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float]:
        """Both. Fails at anything else."""
        if isinstance(value, tuple):
            return value
        share, _, times = str(value).partition(":")
        first, second = _number(share), _number(times)
        if first is None or second is None or not (0 <= first <= 1 and 0 < second <= 1e6):
            self.fail(f"{value!r} is not SHARE:TIMES, such as 0.05:10", param, ctx)
        return first, second


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None
