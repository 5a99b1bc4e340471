"""Processes, from outside: the ranks and spares that a fault names."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainchaos.chaos.fault.base import Fault, Need
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import Aims, MissingTarget, OccurrenceTarget, Site, miss_rank
from trainchaos.recovery.transport.wire import Extra

DEAD = ("Z", "X")
HOG_MORE_MIB = 64  # beyond the limit, in case the kernel does not enforce it


@dataclass(frozen=True)
class ProcessHandle:
    """One process; see chaos.fault.targets.ProcessTarget."""

    scene: Scene
    process: str

    def signal(self, signum: int) -> None:
        """Send a signal; SIGCONT is withheld while another fault still stops the process."""
        if signum == signal.SIGSTOP:
            self.scene.in_force.begin("stopped", self.process, id(self))
        if signum != signal.SIGCONT or not self.scene.in_force.end(
            "stopped", self.process, id(self)
        ):
            self.scene.signal(self.process, signum)

    def signal_later(self, signum: int, delay_s: float) -> None:
        """Send the signal after ``delay_s``."""
        self.scene.later(delay_s, partial(self.scene.signal, self.process, signum))

    def state(self) -> str:
        """The kernel's state of the process."""
        return self.scene.os_state(self.process)

    def starve(self, spare_mib: int) -> None:
        """Limit its memory, and make it allocate beyond the limit."""
        if self.scene.surface.groups is None:
            raise RuntimeError("there are no control groups here")
        self.scene.in_force.begin("starved", self.process, id(self))
        self.scene.surface.groups.limit_memory(self.process, spare_mib)
        self.scene.send(
            self.process, Extra(topic="hog", payload={"at_most_mib": 2 * spare_mib + HOG_MORE_MIB})
        )

    def refuse_device(self) -> str:
        """Refuse new processes on its device."""
        device = self.scene.refuse_device(self.process)
        self.scene.in_force.begin("refused", device, id(self))
        return device

    def accept_device(self) -> None:
        """Admit new processes on its device again, unless another fault still refuses them."""
        if not self.scene.in_force.end("refused", self.scene.device_of(self.process), id(self)):
            self.scene.accept_device(self.process)

    def release(self) -> None:
        """Lift the limit, unless another fault still has one there."""
        self.scene.in_force.end("starved", self.process, id(self))
        release(self.scene, self.process)


class ProcessSite(Site):
    """One occurrence per process."""

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """The present holders of the ranks, then the spares."""
        found: list[OccurrenceTarget | MissingTarget] = []
        for rank in planned.ranks:
            process = self._living(rank)
            who: dict[str, Any] = {"process": process, "rank": rank}
            found.append(self._aim(fault, process, rank, who) if process else miss_rank(rank))
        for index in planned.spares:
            process = self._scene.spare(index)
            who = {"process": process, "rank": None}
            found.append(
                self._aim(fault, process, None, who)
                if process
                else MissingTarget(who={"spare": index}, reason=f"no spare {index} waits")
            )
        return found

    def reachable(self, planned: PlannedFault) -> bool:
        """Whether a process holds each rank, and each spare waits."""
        held = all(self._living(rank) for rank in planned.ranks)
        return held and all(self._scene.spare(index) for index in planned.spares)

    def _living(self, rank: int) -> str | None:
        """The live process that holds a rank. None if the process is dead and its exit not noticed
        yet: otherwise that exit would be attributed to this fault.
        """
        process = self._scene.process_of(rank)
        return process if process and self._scene.os_state(process) not in DEAD else None

    def _aim(
        self, fault: Fault, process: str, rank: int | None, who: Mapping[str, Any]
    ) -> OccurrenceTarget:
        limited = self._scene.surface.groups if fault.wants() & {Need.CGROUP, Need.MEMORY} else None
        look = partial(_seen, self._scene, process)
        return OccurrenceTarget(
            target=ProcessHandle(self._scene, process),
            who=who,
            processes=(process,),
            rank=rank,
            look=look,
            undo=limited.undo(process) if limited is not None else (),
        )


def release(scene: Scene, process: str) -> None:
    """Lift all limits from a process once no fault limits it: memory and processor limits share one
    control group.
    """
    node = scene.node_of(process)
    if (
        scene.surface.groups is None
        or scene.in_force.now("starved", process)
        or scene.in_force.now("rationed", node)
    ):
        return
    scene.surface.groups.release(process)


def _seen(scene: Scene, process: str) -> Mapping[str, Any] | None:
    """The kernel's evidence that a process is stopped, or was killed for its memory."""
    kills = scene.surface.groups.oom_kills(process) if scene.surface.groups is not None else 0
    return {"oom_kills": kills} if kills else stopped(scene, process)


def stopped(scene: Scene, process: str) -> Mapping[str, Any] | None:
    """The kernel's evidence that a process is stopped, if it is."""
    state = scene.os_state(process)
    return {"os_state": state} if state in ("T", "t") else None
