"""The interface of what shows an arm to a person."""

from __future__ import annotations

from typing import Protocol

from trainchaos.chaos.events.log import Event
from trainchaos.harness.launch.launcher import ArmSetup


class Watcher(Protocol):
    """Shows an arm to a person."""

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        """The arm wrote an event."""

    def on_waiting(self, setup: ArmSetup, known: str) -> None:
        """What is ``known`` of a command of which no step was seen yet, for people; empty once one
        was.
        """

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None:
        """The job has committed this many steps."""
