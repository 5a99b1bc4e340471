"""What a health service tells a supervisor: reports of a driver, and alarms of detectors; and which
of them announce a failure, so that work is moved off the place.

A sign that is not believed costs nothing: if the device fails after all, that is a failure like any
other. One that is wrongly believed costs a move at a step boundary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trainchaos.chaos.events.log import Kind, Tail
from trainchaos.recovery.health.readings import Problem, Problems
from trainchaos.recovery.playbook.book import playbook
from trainchaos.recovery.playbook.entry import Entry

MOST_BYTES = 1 << 20
"""Read at once; a report has about 100 bytes, and a longer line than this is none."""
ALARMS = {
    "ecc-uncorrected": "memory errors that were not corrected",
    "device-lost": "the driver does not find the device any more",
}
"""Alarms that announce a failure. The others say that something is slow, hot or unusual: a person
is told, and nothing is moved.
"""


class HealthReport(BaseModel):
    """A driver's report about a device. ``what``: xid (``code`` is its number), ecc, thermal or
    nvlink (``code`` is a count or a value); ``device``: slot or CUDA device; ``node`` and ``rank``:
    its node and rank, where known; ``source``: nvml|injected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: Literal["xid", "ecc", "thermal", "nvlink"]
    code: int
    device: str | None = None
    node: int | None = None
    rank: int | None = None
    source: Literal["nvml", "injected"]


class HealthAlarm(BaseModel):
    """A detector's alarm (``recovery.health.detector.Alarm``), or a device that is gone.
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
    evidence: dict[str, float | int | str] = {}


Sign = HealthReport | HealthAlarm
MODELS: Mapping[Kind, type[HealthReport] | type[HealthAlarm]] = MappingProxyType(
    {Kind.HEALTH_REPORTED: HealthReport, Kind.HEALTH_ALARM: HealthAlarm}
)
"""The event that records each."""


def event_of(sign: Sign) -> tuple[Kind, dict[str, Any]]:
    """The event that records it: kind and data."""
    kind = next(kind for kind, model in MODELS.items() if isinstance(sign, model))
    return kind, sign.model_dump()


def announced(sign: Sign) -> str:
    """Why what was found announces that its place fails, for people; "" if it does not: an XID does
    if the playbook has work leave the device at once (``move``). Raises PlaybookError.
    """
    if isinstance(sign, HealthAlarm):
        return ALARMS.get(sign.what, "")
    entry = entry_of(sign.what, sign.code)
    if entry is None or not entry.move:
        return ""
    return f"{f'XID {sign.code}' if sign.what == 'xid' else sign.what}: {entry.meaning.rstrip('.')}"


def entry_of(what: str, code: object) -> Entry | None:
    """The playbook's entry of a report. What a driver reports as ``ecc`` is a double-bit error, and
    means what XID 48 does; its ``code`` does not count. Raises PlaybookError.
    """
    number = {"xid": code, "ecc": 48}.get(what)
    return playbook().by_xid(number) if type(number) is int else None


class ReportFile:
    """A source: a file to which drivers, monitors or faults in their place (``health-event``)
    append reports, a JSON line each, with the position of its reader. ``new_only``: what is in it
    now is not read: it is of an earlier job.
    """

    name = "reported"

    def __init__(self, path: Path, *, new_only: bool = False) -> None:
        self._path, self._tail = path, Tail(path)
        self._problems = Problems(self.name)
        if new_only:
            with contextlib.suppress(OSError):  # there is none yet
                self._tail.offset = path.stat().st_size

    def append(self, report: HealthReport) -> None:
        """Append a report, as a driver would. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as stream:
            stream.write(report.model_dump_json().encode() + b"\n")

    def read(self, now_s: float = 0.0) -> Sequence[HealthReport]:
        """Reports since the last call; malformed lines are skipped."""
        try:
            data = self._tail.take(MOST_BYTES)
        except FileNotFoundError:  # there are no reports yet
            return []
        except OSError as error:
            self._problems.note("reports", "", error)
            return []
        found = []
        for line in data.splitlines():
            with contextlib.suppress(ValidationError):
                found.append(HealthReport.model_validate_json(line))
        return found

    def problems(self) -> Sequence[Problem]:
        """That it cannot be read, once."""
        return self._problems.take()
