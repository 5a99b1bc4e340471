"""Slows down the key-value store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.targets import StoreTarget
from trainchaos.chaos.fault.witness import effects


class StoreLatency(Fault):
    """Every request to the key-value store arrives ``latency_ms`` late. Emulated by a proxy in
    front of it.

    Training does not need the store, but process groups take longer to form. Landed: an independent
    client measured a request time of at least ``latency_ms``.
    """

    where: ClassVar[Where] = Where.STORE
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    needs: ClassVar[frozenset[Need]] = frozenset({Need.STORE_PROCESS})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    latency_ms: float = Field(gt=0, le=5_000)

    def act(self, target: StoreTarget) -> Mapping[str, Any]:
        """Delay the requests."""
        target.set_latency(self.latency_ms / 1000)
        return {"requested_latency_ms": self.latency_ms}

    def heal(self, target: StoreTarget) -> None:
        """Remove the delay."""
        target.set_latency(0)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The measured round trip."""
        for _, seen in effects(occurrence, events):
            if seen.get("round_trip_s", 0) >= self.latency_ms / 1000:
                measured_ms = round(1000 * seen["round_trip_s"], 2)
                evidence = {
                    "requested_latency_ms": self.latency_ms,
                    "measured_round_trip_ms": measured_ms,
                }
                return Landed(witness="uninvolved client", evidence=evidence)
        return None
