"""Kills the process of the key-value store."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.targets import StoreTarget
from trainchaos.chaos.fault.witness import effects


class StoreKill(Fault):
    """SIGKILL to the process of the key-value store through which process groups are formed. Real.

    Training does not need the store and is not disturbed. The launcher starts another, empty store
    on a new port; a group being formed at that time fails and is formed again. Landed: the wait
    status of the reaped store, and the new port.
    """

    where: ClassVar[Where] = Where.STORE
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.STORE_PROCESS})

    def act(self, target: StoreTarget) -> Mapping[str, Any]:
        """Kill the store."""
        target.signal(signal.SIGKILL)
        return {"sent_signal": int(signal.SIGKILL)}

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The store's exit as seen by the launcher."""
        for _, seen in effects(occurrence, events):
            if seen.get("reaped_signal") == signal.SIGKILL:
                return Landed(witness="kernel: wait status", evidence=dict(seen))
        return None
