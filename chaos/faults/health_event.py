"""Adds a driver event to the health source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from trainchaos.chaos.fault.targets import HealthTarget


class HealthEvent(Fault):
    """An event in the health source that monitors read, as a driver would report it: an XID, ECC,
    thermal or NVLink event. Or another value that the device's monitor reads from now on, for the
    detectors of devices: temperature, corrected ECC errors, link bandwidth, utilisation. Emulated:
    the device itself is healthy.

    One that announces a failure (``recovery.health.signs``) warns the job: the strategy moves
    the rank to a spare or saves a checkpoint. Another one is only recorded.

    ``what``: kind of event, or what is read. ``code``: number of the XID (79: fallen off the bus,
    94: contained ECC), else a count or degrees; of a value: degrees Celsius, corrected errors a
    minute, % of the usual bandwidth, % of utilisation. A scenario with one of those has emulated
    devices, all well before, in every arm. ``unfit``: a preflight of the place, where the job has
    it checked (``health: {preflight_rejoins: true}``), finds it unfit from now on. Landed: the
    reader of the health source reported it.
    """

    where: ClassVar[Where] = Where.HEALTH
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    harmless: ClassVar[bool] = True
    beside_steps: ClassVar[bool] = True

    what: Literal[
        "xid",
        "ecc",
        "thermal",
        "nvlink",
        "temperature",
        "corrected-ecc",
        "link-bandwidth",
        "utilisation",
    ] = "xid"
    code: int = Field(default=94, ge=0, le=100_000)
    unfit: bool = False

    def act(self, target: HealthTarget) -> Mapping[str, Any]:
        """Report the event."""
        if self.unfit:
            target.spoil()
        target.report(what=self.what, code=self.code)
        return {"what": self.what, "code": self.code}

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The event as reported by the source's reader."""
        for event in events:
            if event.kind is not Kind.HEALTH_REPORTED or event.time_ns < occurrence.time_ns:
                continue
            same = (event.data["what"], event.data["code"]) == (self.what, self.code)
            whose = all(event.data[key] == occurrence.target.get(key) for key in ("rank", "node"))
            if same and whose:
                evidence = {key: event.data[key] for key in ("what", "code", "device")}
                return Landed(witness="reader of the health source", evidence=evidence)
        return None
