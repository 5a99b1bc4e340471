"""Who watches an arm from outside, and who ends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chaos.events.log import Event
from harness.launch.launcher import ArmSetup


class Watcher(Protocol):
    """Follows an arm for a person."""

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        """The orchestrator wrote an event."""

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None:
        """So many steps are committed."""


@dataclass(kw_only=True)
class StopFlag:
    """Set by a signal handler; the loop looks at it."""

    signum: int = 0
