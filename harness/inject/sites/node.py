"""Nodes, from outside: all processes of one machine, or of all machines of a rack, at once."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainchaos.chaos.fault.base import Fault, Need
from trainchaos.chaos.fault.targets import ProcessTarget
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import Aims, MissingTarget, OccurrenceTarget, Site
from trainchaos.harness.inject.sites.process import DEAD, ProcessHandle, release, stopped
from trainchaos.harness.launch.launcher import MachineControl

RUNS = ("running", "unknown", None)


@dataclass(frozen=True)
class NodeHandle:
    """Nodes that are hit together; see chaos.fault.targets.NodeTarget."""

    scene: Scene
    nodes: Sequence[int]
    names: Sequence[str]

    @property
    def processes(self) -> Sequence[ProcessTarget]:
        """The processes that lived there when it was made."""
        return [ProcessHandle(self.scene, name) for name in self.names]

    def kill(self) -> Mapping[str, Any]:
        """Kill the machines, or their processes where there are no machines."""
        if self.scene.surface.machines is not None:
            return {
                "machines": {
                    str(node): dict(self.scene.surface.machines.kill(node)) for node in self.nodes
                }
            }
        for process in self.processes:
            process.signal(signal.SIGKILL)
        return {"signal": "SIGKILL", "processes": len(self.names)}

    def pause(self) -> Mapping[str, Any]:
        """Pause the machines, or stop their processes where machines cannot be paused."""
        machines = self._pausable()
        if machines is not None:
            for node in self.nodes:
                self.scene.in_force.begin("stopped", node, id(self))
                machines.pause(node)
            return {"paused": list(self.nodes)}
        for name in self.names:
            self.scene.in_force.begin("stopped", name, id(self))
            self.scene.signal(name, signal.SIGSTOP)
        return {"signal": "SIGSTOP", "processes": len(self.names)}

    def resume(self) -> None:
        """Undo ``pause``."""
        machines = self._pausable()
        if machines is not None:
            for node in self.nodes:
                if not self.scene.in_force.end("stopped", node, id(self)):
                    machines.resume(node)
            return
        for name in self.names:
            if not self.scene.in_force.end("stopped", name, id(self)):
                self.scene.signal(name, signal.SIGCONT)

    def _pausable(self) -> MachineControl | None:
        machines = self.scene.surface.machines
        return machines if machines is not None and machines.can_pause else None

    def ration(self, cores: float) -> None:
        """Limit the processes to ``cores`` with the control groups of the arm."""
        if self.scene.surface.groups is None:
            raise RuntimeError("there are no control groups here")
        for node in self.nodes:
            here = set(self.scene.on_node(node))
            names = [name for name in self.names if name in here]
            self.scene.in_force.begin("rationed", node, id(self), (names, cores))
            self.scene.surface.groups.limit_cores(names, cores)

    def unration(self) -> None:
        """Lift the limit, except for limits that other faults still have there."""
        groups = self.scene.surface.groups
        for node in self.nodes if groups is not None else ():
            assert groups is not None
            if left := self.scene.in_force.end("rationed", node, id(self)):
                groups.limit_cores(*left[-1])
        for name in self.names:
            release(self.scene, name)


class NodeSite(Site):
    """One occurrence per node, or per rack for a fault that takes whole racks."""

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """All processes on the nodes now: ranks, spares, and those still starting."""
        if not fault.whole_racks:
            return [self._aim(fault, [node]) for node in planned.nodes]
        racks: dict[int, list[int]] = {}
        for node in planned.nodes:
            racks.setdefault(self._scene.setup.cell.scenario.topology.rack_of(node), []).append(
                node
            )
        return [self._aim(fault, nodes, rack=rack) for rack, nodes in racks.items()]

    def reachable(self, planned: PlannedFault) -> bool:
        """Whether each node has a process, or is a machine, which can be lost without any."""
        machines = self._scene.surface.machines is not None
        return machines or all(self._scene.on_node(node) for node in planned.nodes)

    def _aim(
        self, fault: Fault, nodes: Sequence[int], rack: int | None = None
    ) -> OccurrenceTarget | MissingTarget:
        names = [name for node in nodes for name in self._scene.on_node(node)]
        who: dict[str, Any] = {"nodes": list(nodes), "processes": names}
        if rack is not None:
            who["rack"] = rack
        if not names and (self._scene.surface.machines is None or Need.QUOTA in fault.wants()):
            where = ", ".join(map(str, nodes))
            return MissingTarget(who=who, reason=f"no process is on node {where}")
        handle = NodeHandle(self._scene, tuple(nodes), tuple(names))
        if Need.QUOTA in fault.wants():
            groups = self._scene.surface.groups
            undo = (
                [record for name in names for record in groups.undo(name)]
                if groups is not None
                else []
            )
            look = partial(_waiting, self._scene, names)
            return OccurrenceTarget(
                target=handle, who=who, processes=tuple(names), look=look, undo=undo
            )
        machines = self._scene.surface.machines
        before = {node: machines.seen(node) for node in nodes} if machines is not None else {}
        look = partial(_changed, self._scene, before, names)
        return OccurrenceTarget(target=handle, who=who, processes=tuple(names), look=look)


def _changed(
    scene: Scene, before: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> Mapping[str, Any] | None:
    """Evidence from the platform that none of the machines runs, or from the kernel that the
    processes are stopped, but for those that were ending as they were to be stopped.
    """
    if scene.surface.machines is not None:
        states = {
            str(node): _since(scene.surface.machines.seen(node), seen)
            for node, seen in before.items()
        }
        if not any(seen.get("state") in RUNS for seen in states.values()):
            return {"nodes": states}
    still = [name for name in names if stopped(scene, name)]
    others = (name for name in names if name not in still)
    if not still or any(scene.os_state(name) not in DEAD for name in others):
        return None
    return {"os_state": "T", "processes": still}


def _since(now: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """A node that is now another machine has lost the machine it was."""
    if "machine" in now and now["machine"] != before.get("machine"):
        return {"state": "removed", "machine": before.get("machine"), "replaced_by": now["machine"]}
    return now


def _waiting(scene: Scene, names: Sequence[str]) -> Mapping[str, Any] | None:
    """In how many periods the kernel throttled one of them."""
    kept = (
        max(map(scene.surface.groups.throttled, names), default=0)
        if scene.surface.groups is not None
        else 0
    )
    return {"throttled": kept} if kept else None
