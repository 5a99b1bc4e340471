"""Reads the register of recovery times, docs/results/recovery-times.yaml: figures, trial counts,
machines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML, YAMLError

from trainchaos.chaos.errors import ScenarioError

Value = Annotated[str, Field(pattern=r"^(\d+(\.\d+)?|never)$")]
"""A number as printed, so that 0.130 stays 0.130; ``never``: a median over values of which more
than half never recovered.
"""


class RegisterModel(BaseModel):
    """Base of the register's models."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(RegisterModel):
    """A measurement of one stack or strategy (``of``) under one fault. ``metric``: recovery, or
    another metric; ``also``: more values of the same trials, by name.
    """

    of: str = Field(min_length=1)
    fault: str = Field(min_length=1)
    metric: str = "recovery"
    n: int = Field(ge=1)
    median: Value
    spread: tuple[Value, Value] | None = None
    also: dict[str, Value] = Field(default={})
    note: str = ""

    @property
    def id(self) -> str:
        """Its id within the measurement."""
        words = [self.of, self.fault, *([] if self.metric == "recovery" else [self.metric])]
        return "/".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words)

    @property
    def values(self) -> dict[str, str]:
        """Its values that a page states, by name."""
        low_high = dict(zip(("low", "high"), self.spread or (), strict=False))
        values = {"median": self.median, **low_high, **self.also}
        return {name: value for name, value in values.items() if value != "never"}


class Measurement(RegisterModel):
    """Figures of one session. ``what``: the scenario or the benchmark; ``commit``: of the code,
    empty: unknown, with the date instead; ``machine``: one of the register's; ``source``: the
    command, or another origin; ``archive``: file below docs/results with the runs;
    ``superseded_by``: the newer measurement of the same, if a page still shows the old one beside
    it; ``spread``: meaning of the two numbers beside a median, unless a figure's note says
    otherwise.
    """

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    what: str = Field(min_length=1)
    date: date
    commit: str = Field(default="", pattern=r"^([0-9a-f]{7,40})?$")
    machine: str
    source: str = Field(min_length=1)
    archive: str = Field(default="", pattern=r"^([\w.-]+\.tar\.xz)?$")
    superseded_by: str = ""
    unit: Literal["s", "ms"] = "s"
    spread: Literal["quartiles", "range", "95 % interval", "not kept", "none, one trial each"]
    figures: list[Figure] = Field(min_length=1)

    @model_validator(mode="after")
    def _spreads_are_said(self) -> Measurement:
        silent = self.spread in ("not kept", "none, one trial each")
        for one in self.figures:
            if silent and one.spread is not None:
                raise ValueError(
                    f"{one.id} has a spread, where the measurement says {self.spread!r}"
                )
            if not silent and one.spread is None and one.n > 1 and not one.note:
                raise ValueError(
                    f"{one.id} has no spread of its {one.n} values: give it, or say why in its note"
                )
        return self


class Register(RegisterModel):
    """``machines``: name -> description."""

    machines: dict[str, str]
    measurements: list[Measurement]

    @model_validator(mode="after")
    def _names_are_known(self) -> Register:
        for name, count in Counter(id for id, _, _ in self.every()).items():
            if count > 1:
                raise ValueError(f"{name} is there {count} times")
        for one in self.measurements:
            if one.machine not in self.machines:
                raise ValueError(
                    f"{one.id}: machine {one.machine!r} is none of {', '.join(self.machines)}"
                )
            if one.superseded_by and one.superseded_by not in {
                other.id for other in self.measurements
            }:
                raise ValueError(
                    f"{one.id}: no measurement {one.superseded_by!r}, which is to supersede it"
                )
        return self

    def every(self) -> Iterator[tuple[str, Measurement, Figure]]:
        """(id, measurement, figure) of all figures."""
        for measurement in self.measurements:
            for figure in measurement.figures:
                yield f"{measurement.id}/{figure.id}", measurement, figure


def load(path: Path) -> Register:
    """Read the register, strictly. Raises ScenarioError: one line for each error."""
    try:
        return Register.model_validate(YAML(typ="base", pure=True).load(path.read_text()))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except YAMLError as error:
        raise ScenarioError(f"{path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        ]
        raise ScenarioError("\n".join(lines)) from error
