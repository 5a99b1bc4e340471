"""The shape of a number in ``results.json``: values that may be infinite or missing."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from trainchaos.chaos.units import counted


class Model(BaseModel):
    """Base of what ``results.json`` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _to_json(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


_NAMES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
Number = Annotated[
    float,
    BeforeValidator(lambda value: _NAMES.get(value, value) if isinstance(value, str) else value),
    PlainSerializer(_to_json),
]
"""A number that may be infinite (never recovered) or NaN (a loss); written as text in JSON, which
has neither.
"""


class Metric(Model):
    """One metric over the repeats of a cell. Non-recovery counts as infinity (``"Infinity"`` in
    JSON) and is never left out.
    """

    unit: str
    values: list[Number]
    n: int
    median: Number | None
    min: Number | None
    max: Number | None
    ci95: tuple[Number, Number] | None = Field(
        description="distribution-free interval of the median arm; None for fewer than 6 arms"
    )
    better: Literal["lower", "higher", "neither"] = "lower"
    clock_bound: float = Field(
        default=0.0,
        description=("largest error of a value, as clocks of several machines are in it"),
    )
    arms: list[int] = Field(
        default=[], description="repeat that each value is of; empty in older results"
    )
    p95: Number | None = Field(default=None, description="of arms; None for fewer than 59 of them")
    p99: Number | None = Field(default=None, description="of arms; None for fewer than 299 of them")
    of: int | None = Field(
        default=None,
        description=(
            "incidents or arms that could have given a value, n of which did; None: not counted, as"
            " of checkpoints and in older results"
        ),
    )
    of_arms: int | None = Field(
        default=None, description="arms that were planned; None in older results"
    )

    @property
    def counted(self) -> str:
        """How many values there are: ``3``, or ``2 of 3`` if an incident or an arm gave none."""
        return counted(self.n, self.of)
