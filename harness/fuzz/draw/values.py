"""Random values for a plugin's parameters, from its model: kinds, strategies, and later
additions.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

TRIES = 50
LEFT_OUT = 0.4
"""Share of parameters with a default that are omitted."""
AT_AN_END = 0.15
"""Share of numbers that are the smallest or largest allowed one."""
SELDOM = {"sample": 0.95}
"""The same of single ones: few samples of a data set are ever computed."""
MOST = {
    "delay_s": 1.0,
    "down_s": 0.2,
    "up_s": 0.2,
    "_s": 20.0,
    "jitter_ms": 10.0,
    "delay_ms": 200.0,
    "_ms": 2000.0,
    "factor": 8.0,
    "_mib": 256.0,
    "spares": 3.0,
    "mbit_per_s": 20.0,
    "cores": 1.0,
}
"""Upper limits by the end of a name, the first that fits: larger values are allowed, but only take
longer, or are too mild to show.
"""
LEAST = {
    "mbit_per_s": 1.0,
    "_ms": 10.0,
    "delay_s": 0.05,
    "down_s": 0.05,
    "factor": 2.0,
    "percent": 10.0,
    "probability": 0.5,
}
"""Lower limits of values that would otherwise stop a job altogether, or be too mild to show."""
WIDEST = 1000.0
TEXTS = ("it broke", "x", 'a "word": {of} [several]')
SMALLEST = 1e-3
Limits = tuple[Mapping[str, float], Mapping[str, float]]


@dataclass(frozen=True)
class Bounds:
    """Allowed numbers of a field, and the part of them to draw from."""

    ge: float | None = None
    gt: float = -WIDEST
    le: float | None = None
    lt: float = WIDEST
    most: float = WIDEST
    least: float = -math.inf

    @classmethod
    def of(cls, name: str, field: FieldInfo, limits: Limits) -> Bounds:
        """``limits``: most and least, by the ends of names; the first that fits."""
        ends = [[limit for end, limit in each.items() if name.endswith(end)] for each in limits]
        given = {
            which: found[0] for which, found in zip(("most", "least"), ends, strict=True) if found
        }
        for part in field.metadata:
            for bound in ("ge", "gt", "le", "lt"):
                if (value := getattr(part, bound, None)) is not None:
                    given[bound] = float(value)
        return cls(**given)

    @property
    def low(self) -> float:
        """The smallest number allowed, or one just below all."""
        return self.gt if self.ge is None else self.ge

    def number(self, rng: random.Random) -> float:
        """Small numbers as often as large ones; sometimes an end of the range."""
        low = max(self.low, self.least)
        high = max(self.low, min(self.lt if self.le is None else self.le, self.most))
        if rng.random() < AT_AN_END and self.ge is not None:
            return low
        if rng.random() < AT_AN_END and self.le == high:
            return high
        least = max(low, SMALLEST) if low >= 0 else low
        if least <= 0 or high / least < 2:
            return rng.uniform(low, high)
        return math.exp(rng.uniform(math.log(least), math.log(high)))


def params_of(
    model: type[BaseModel],
    rng: random.Random,
    most: Mapping[str, float] = MOST,
    least: Mapping[str, float] = LEAST,
) -> dict[str, Any]:
    """A valid combination of a plugin's parameters; those without a default are always included.
    ``most``, ``least``: limits of numbers, by the ends of their names. After ``TRIES`` invalid
    combinations only parameters without a default are given. Raises ValidationError if those are
    invalid too.
    """
    for _ in range(TRIES):
        params = _drawn(model, rng, (most, least))
        try:
            model(**params)
        except ValidationError:
            continue
        return params
    params = _drawn(model, rng, (most, least), left_out=1.0)
    model(**params)
    return params


def _drawn(
    model: type[BaseModel], rng: random.Random, limits: Limits, left_out: float = LEFT_OUT
) -> dict[str, Any]:
    return {
        name: _of(name, field.annotation, Bounds.of(name, field, limits), rng)
        for name, field in model.model_fields.items()
        if field.is_required() or rng.random() >= SELDOM.get(name, left_out)
    }


def _of(name: str, kind: Any, bounds: Bounds, rng: random.Random) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return rng.choice(inner)
    if origin in (Union, types.UnionType):
        return _of(name, rng.choice(inner), bounds, rng)
    if origin is tuple:
        options = list(get_args(inner[0])) if get_origin(inner[0]) is Literal else []
        return sorted(rng.sample(options, rng.randint(1, len(options))))
    if kind is type(None):
        return None
    if kind is str:
        return rng.choice(TEXTS)
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return max(round(bounds.number(rng)), math.ceil(bounds.low))
    if kind is float:
        return float(f"{bounds.number(rng):.3g}")
    raise TypeError(f"{name}: {kind}")
