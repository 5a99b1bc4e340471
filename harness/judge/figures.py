"""The shape of a number in ``results.json``: values that may be infinite or missing."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from trainchaos.chaos.events.figures import counted


class Model(BaseModel):
    """Base of what ``results.json`` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _to_json(value: float | None) -> float | str | None:
    return "Infinity" if value is not None and math.isinf(value) else value


def _from_json(value: Any) -> Any:
    return math.inf if value == "Infinity" else value


class Metric(Model):
    """One metric over the repeats of a cell. Non-recovery counts as infinity (``"Infinity"`` in
    JSON) and is never left out.
    """

    unit: str
    values: list[float]
    n: int
    median: float | None
    min: float | None
    max: float | None
    ci95: tuple[float, float] | None = Field(
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
    p95: float | None = Field(default=None, description="of arms; None for fewer than 59 of them")
    p99: float | None = Field(default=None, description="of arms; None for fewer than 299 of them")
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

    @field_validator("values", "ci95", mode="before")
    @classmethod
    def _read_all(cls, value: Any) -> Any:
        return value if value is None else [_from_json(v) for v in value]

    @field_validator("median", "min", "max", "p95", "p99", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return _from_json(value)

    @field_serializer("values", "ci95")
    def _write_all(self, value: Any) -> Any:
        return value if value is None else [_to_json(v) for v in value]

    @field_serializer("median", "min", "max", "p95", "p99")
    def _write(self, value: float | None) -> float | str | None:
        return _to_json(value)
