"""What several faults take as evidence: how a process ended, and that nobody else had asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from chaos.events import Event, Kind
from chaos.fault import Occurrence


def exit_of(occurrence: Occurrence, events: Sequence[Event], process: str | None = None) -> Event | None:
    """The reaped exit of the process hit, or of ``process``; None while there is none, or when its supervisor had
    asked for its end before the fault acted: then the exit shows nothing of the fault."""
    name = process if process is not None else occurrence.process
    for event in events:
        if event.kind is Kind.PROCESS_EXITED and event.data["process"] == name:
            asked_ns = event.data.get("asked_ns")
            return None if asked_ns is not None and asked_ns < occurrence.time_ns else event
    return None
