"""Makes the kernel's OOM killer kill a process."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Ends, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Need, Where
from trainchaos.chaos.fault.targets import ProcessTarget
from trainchaos.chaos.fault.witness import effects_of, exit_of


class OomKill(Fault):
    """The memory limit is set ``spare_mib`` above current usage, and a thread of the process
    allocates until the kernel kills it: a leak in a data loader. Real, as root with control groups,
    or in a container.

    The limit applies to a control group that holds only this process, so no other process can be
    killed; where its node is a container, the limit is the container's, and the kernel kills the
    largest process there. Healing removes the limit. Landed: the kernel counted an out-of-memory
    kill in the group, and reports the process ended by SIGKILL.
    """

    where: ClassVar[Where] = Where.PROCESS
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MEMORY})

    spare_mib: int = Field(
        default=32, ge=8, le=4096, description="MiB the process may still allocate"
    )

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Limit its memory, and make it allocate."""
        target.starve(self.spare_mib)
        return {"spare_mib": self.spare_mib}

    def heal(self, target: ProcessTarget) -> None:
        """Remove the limit."""
        target.release()

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(signal=signal.SIGKILL),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The kernel's count of OOM kills, and the reaped exit status."""
        ended = exit_of(occurrence, events)
        kills = max(
            (effect.get("oom_kills", 0) for effect in effects_of(occurrence, events)), default=0
        )
        if ended is None or ended.data["signal"] != signal.SIGKILL or not kills:
            return None
        evidence = {"signal": ended.data["signal"], "oom_kills": kills}
        return Landed(witness="kernel: control group and wait status", evidence=evidence)
