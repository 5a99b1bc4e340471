"""Crashes a rank with a segmentation fault."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Ends, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import exit_of


class ProcessSegv(Fault):
    """The rank reads address 0 on its training thread: a bug in native code. Real.

    Landed: the kernel reports the process ended by SIGSEGV.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Read address 0."""
        target.body.segfault()
        return {"address": 0}

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(signal=signal.SIGSEGV),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit status."""
        ended = exit_of(occurrence, events)
        if ended is None or ended.data["signal"] != signal.SIGSEGV:
            return None
        return Landed(witness="kernel: wait status", evidence={"signal": ended.data["signal"]})
