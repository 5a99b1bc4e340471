"""What a health service tells a supervisor: reports of a driver, and alarms of detectors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.health.readings.reports import HealthReport

Evidence = dict[str, float | int | str]


class HealthAlarm(BaseModel):
    """A detector's alarm (``recovery.health.detectors.base.Alarm``), or a device that is gone.
    ``what`` looks wrong at ``rank``, ``node`` and ``device``, where known, for ``lasted_s`` seconds
    by now; ``value`` exceeds ``threshold``, both in the detector's unit; ``evidence``: for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    what: str
    rank: int | None = None
    node: int | None = None
    device: str | None = None
    lasted_s: float = 0.0
    value: float
    threshold: float
    evidence: Evidence = {}


Sign = HealthReport | HealthAlarm
MODELS: Mapping[Kind, type[HealthReport] | type[HealthAlarm]] = MappingProxyType(
    {Kind.HEALTH_REPORTED: HealthReport, Kind.HEALTH_ALARM: HealthAlarm}
)
"""The event that records each."""


def event_of(sign: Sign) -> tuple[Kind, dict[str, Any]]:
    """The event that records it: kind and data."""
    kind = next(kind for kind, model in MODELS.items() if isinstance(sign, model))
    return kind, sign.model_dump()
