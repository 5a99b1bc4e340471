"""The kernel kills a process for the memory it takes."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events import Event, Kind
from chaos.fault import Fault, Landed, Need, Occurrence, Where
from chaos.targets import ProcessTarget
from chaos.witness import exit_of


class OomKill(Fault):
    """The process is put into a control group of its own with a memory limit ``spare_mib`` above what it uses, and a
    thread of it allocates until the kernel kills it: a leak in a data loader. Real, as root with control groups.

    Nobody else is in the group, so nobody else can be killed. Healed by removing the group. Landed: the kernel counts
    an out-of-memory kill in the group, and reports the process ended by SIGKILL.
    """

    where: ClassVar[Where] = Where.PROCESS
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CGROUP})

    spare_mib: int = Field(default=32, ge=8, le=4096, description="MiB it may still allocate")

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Limit it, and have it allocate."""
        target.starve(self.spare_mib)
        return {"spare_mib": self.spare_mib}

    def heal(self, target: ProcessTarget) -> None:
        """Remove the group."""
        target.release()

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The kernel's count, and the reaped exit status."""
        ended = exit_of(occurrence, events)
        counts = [
            event.data["evidence"].get("oom_kills", 0)
            for event in events
            if event.kind is Kind.FAULT_EFFECT
            and (event.data["fault"], event.data["occurrence"]) == (occurrence.fault, occurrence.number)
        ]
        kills = max(counts, default=0)
        if ended is None or ended.data["signal"] != signal.SIGKILL or not kills:
            return None
        evidence = {"signal": ended.data["signal"], "oom_kills": kills}
        return Landed(witness="kernel: control group and wait status", evidence=evidence)
