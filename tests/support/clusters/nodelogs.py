"""Synthetic logs of ranks on nodes with clocks of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.logs import MS, Line, Script
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind

HOURS_NS = 5 * 3600 * 10**9
FAR = "boot-of-another-machine"
NEAR = "boot-of-the-coordinator"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A node's clock, as far from the coordinator's as ``ahead_ns`` and ``drift`` say."""

    ahead_ns: int = HOURS_NS
    drift: float = 0.0

    def at(self, time_ns: int) -> int:
        """What it shows at a time of the coordinator's."""
        return time_ns + self.ahead_ns + round(self.drift * time_ns)


def on_nodes(
    script: Script,
    clock: Clock,
    *,
    every_ms: int | None = 500,
    bound_ns: int = 0,
    error_ns: Callable[[int], int] = lambda time: 0,
    boot: str = FAR,
) -> Script:
    """The same arm with its ranks by two on nodes, all with ``clock``, which is measured
    ``every_ms`` (None: never).
    """
    end = script.now
    for line in script.lines:
        if line.kind is Kind.PROCESS_SPAWNED:
            line.data["node"] = int(line.data["process"][1:]) // 2
        if line.kind is Kind.ACTOR_STARTED:
            line.data["wall_ns"] = line.time_ns
        if line.actor != ORCHESTRATOR:
            line.time_ns = clock.at(line.time_ns)
    for node in (0, 1, 2, 3):
        about = {
            "node": node,
            "host": f"host{node}",
            "boot": boot,
            "address": "10.0.0.1",
            "devices": [],
        }
        script.lines.append(Line(ORCHESTRATOR, Kind.NODE_JOINED, 1, 0, None, about))
        for at in range(2, end, every_ms * MS) if every_ms is not None else ():
            offset = clock.at(at) - at + error_ns(at)
            found = {"node": node, "offset_ns": offset, "bound_ns": bound_ns}
            script.lines.append(Line(ORCHESTRATOR, Kind.CLOCK_MEASURED, at, 0, None, found))
    return script
