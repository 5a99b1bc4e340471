"""What an agent reports to its coordinator repeatedly: progress marks, and how short of CPU its
ranks are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from trainchaos.recovery.nodes.agent.agent_processes import AgentProcesses
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.beat_rate import LEAST_S, QUIET
from trainchaos.recovery.nodes.link.protocol import MarkWords
from trainchaos.recovery.process.pressure import EVERY_S as PRESSURE_EVERY_S
from trainchaos.recovery.process.pressure import PressureReader


class Beats:
    """The marks and states reported last, so that only changes are sent. Make a new one for a
    coordinator that may know nothing. ``beat_s``: what it said.
    """

    def __init__(self, beat_s: float = LEAST_S) -> None:
        self._beat_s = beat_s
        self._marks: Mapping[str, MarkWords] = {}
        self._states: Mapping[str, str] = {}
        self._sent_s = 0.0

    def due(
        self, processes: AgentProcesses, now_s: float, *, at_once: bool
    ) -> protocol.Beat | None:
        """What to send now; with no change, only when nothing was sent for QUIET times
        as long. ``at_once``: a change does not wait.
        """
        marks, states = processes.marks(), processes.states()
        moved = {name: mark for name, mark in marks.items() if self._marks.get(name) != mark}
        turned = {name: state for name, state in states.items() if self._states.get(name) != state}
        changed = bool(moved) or any(
            "t" in (turned[name] + self._states.get(name, "")).lower() for name in turned
        )
        due_s = self._sent_s + self._beat_s * (1 if changed else QUIET)
        if now_s < due_s and not (changed and at_once):
            return None
        self._marks, self._states, self._sent_s = marks, states, now_s
        return protocol.Beat(
            time_ns=time.monotonic_ns(),
            marks=moved,
            states=turned,
            pulses=dict(processes.pulses()),
        )


class PressureWatch:
    """How short of CPU the ranks of the node are, read every PRESSURE_EVERY_S."""

    def __init__(self) -> None:
        self._reader = PressureReader()
        self._due_s = 0.0

    def due(self, pids: Mapping[str, int], now_s: float) -> protocol.Pressed | None:
        """What to send now, if anything. ``pids``: of the ranks, by name."""
        if now_s < self._due_s or not pids:
            return None
        self._due_s = now_s + PRESSURE_EVERY_S
        found = self._reader.read(pids)
        if found is None:
            return None
        return protocol.Pressed(time_ns=time.monotonic_ns(), **asdict(found))
