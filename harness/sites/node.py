"""Nodes, from outside: all processes of one machine, or of all machines of one rack, at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from chaos.fault import Fault
from chaos.schedule import PlannedFault
from chaos.targets import ProcessTarget
from harness.scene import Scene
from harness.sites import Aim, Miss
from harness.sites.process import ProcessHandle, stopped


@dataclass(frozen=True)
class NodeHandle:
    """Nodes that go together; see chaos.targets.NodeTarget."""

    nodes: Sequence[int]
    processes: Sequence[ProcessTarget]


class NodeSite:
    """One occurrence for each node, or for each rack of a fault that takes whole racks."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Sequence[Aim | Miss]:
        """Everybody who is on the nodes now: ranks, spares, and those that only start."""
        if not getattr(type(fault), "whole_racks", False):
            return [self._aim([node]) for node in planned.nodes]
        racks: dict[int, list[int]] = {}
        for node in planned.nodes:
            racks.setdefault(self._scene.setup.cell.scenario.topology.rack_of(node), []).append(node)
        return [self._aim(nodes, rack=rack) for rack, nodes in racks.items()]

    def reachable(self, planned: PlannedFault) -> bool:
        """Whether somebody is on each node."""
        return all(self._scene.on_node(node) for node in planned.nodes)

    def _aim(self, nodes: Sequence[int], rack: int | None = None) -> Aim | Miss:
        names = [name for node in nodes for name in self._scene.on_node(node)]
        who: dict[str, Any] = {"nodes": list(nodes), "processes": names}
        if rack is not None:
            who["rack"] = rack
        if not names:
            return Miss(who=who, reason=f"nobody is on node {', '.join(map(str, nodes))}")
        handle = NodeHandle(nodes, [ProcessHandle(self._scene, name) for name in names])
        return Aim(target=handle, who=who, processes=tuple(names), look=partial(_stopped, self._scene, names))


def _stopped(scene: Scene, names: Sequence[str]) -> Mapping[str, Any] | None:
    """The kernel's word that the processes are stopped, if all are."""
    seen = [stopped(scene, name) for name in names]
    return {"os_state": "T", "processes": list(names)} if all(seen) else None
