"""A saved baseline: the rates of a machine when it was good, and the hardware they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError
from trainchaos.chaos.files import read_model, reason
from trainchaos.harness.launch.devices import cuda_devices, processor
from trainchaos.harness.preflight.check import Rate
from trainchaos.recovery.health.estimates import median

REPEATS = 5
"""Of a baseline: a prediction limit of fewer is wide (Student's t at 4 degrees of freedom is 8.6 at
a tail of 0.0005, at 2 degrees 31.6), and more take long.
"""


class BaselineError(ChaosError):
    """A baseline cannot be read, or is of other hardware."""

    exit_code = EXIT_USAGE


class BaselineRate(BaseModel):
    """Of one quantity of one place: the medians of the repeats."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: str
    metric: str
    place: str
    unit: str
    high_is_good: bool
    values: list[float] = Field(min_length=2, max_length=1000)


class Baseline(BaseModel):
    """``hardware``: as ``hardware()``; ``made``: UTC."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    made: str
    hardware: dict[str, Any]
    rates: list[BaselineRate]

    def find(self, rate: Rate) -> BaselineRate | None:
        """The same quantity of the same place, if it was saved."""
        key = (rate.check, rate.metric, rate.place, rate.unit)
        return next(
            (one for one in self.rates if (one.check, one.metric, one.place, one.unit) == key), None
        )


def hardware(places: Sequence[str]) -> dict[str, Any]:
    """What rates depend on: processor, usable cores, devices with their driver, torch, places."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    devices = cuda_devices()
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": devices,
        "driver": _driver() if devices else "",
        "torch": torch,
        "places": list(places),
    }


def of_repeats(repeats: Sequence[Sequence[Rate]], hardware: Mapping[str, Any]) -> Baseline:
    """A baseline of several measurements; a quantity that one of them lacks is left out."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for rates in repeats:
        for one in rates:
            values.setdefault((one.check, one.metric, one.place), []).append(median(one.rounds))
    kept = [
        BaselineRate(
            check=one.check,
            metric=one.metric,
            place=one.place,
            unit=one.unit,
            high_is_good=one.high_is_good,
            values=values[one.check, one.metric, one.place],
        )
        for one in (repeats[0] if repeats else ())
        if len(values[one.check, one.metric, one.place]) == len(repeats) >= 2
    ]
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return Baseline(made=made, hardware=dict(hardware), rates=kept)


def read(path: Path) -> Baseline:
    """Read one. Raises BaselineError, with the line where it is no JSON, and NewerVersion."""
    try:
        return read_model(path, Baseline, follow=True)
    except (OSError, ValueError) as error:
        why = f"{path} cannot be read as a baseline: {reason(error)}"
        if isinstance(error, json.JSONDecodeError):
            why = f"{path}:{error.lineno}: it is no JSON: {error.msg}"
        hint = "chaos doctor --preflight --save-baseline FILE writes one"
        raise BaselineError(why, hint=hint) from error


def refuse_other(path: Path, baseline: Baseline, here: Mapping[str, Any]) -> None:
    """Raise BaselineError if it is of other hardware, by name."""
    was = baseline.hardware
    names = [*here, *(name for name in was if name not in here)]
    differ = [
        f"{name} was {_text(was.get(name))} and is {_text(here.get(name))}"
        for name in names
        if was.get(name) != here.get(name)
    ]
    if differ:
        raise BaselineError(
            f"{path} is of other hardware: {'; '.join(differ)}",
            hint="save one of this machine with --save-baseline, or compare with --other-hardware",
        )


def _text(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value) or "none"


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""
    finally:
        pynvml.nvmlShutdown()
