"""Directed links between ranks: a proxy that they lead through, or the kernel's between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaos.fault.base import Fault, Need
from chaos.fault.targets import LinkShape
from chaos.schedule.plan import PlannedFault
from harness.arm.fault_context import Scene
from harness.inject.sites import Aim, Miss
from harness.inject.sites.process import miss_rank
from harness.launch.launcher import LinkControl
from recovery.transport.wire import Extra

NO_CONTROL = "no link can be shaped here"


class LinkHandle:
    """Links by rank, held to the processes that held the ranks when it was made; see chaos.fault.targets.LinkTarget.

    ``look`` measures the first of them once it is shaped. ``control``: None where nothing shapes links.
    """

    def __init__(
        self, scene: Scene, control: LinkControl | None, names: Mapping[int, str],
        links: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.links = links
        self._scene = scene
        self._control = control
        self._names = names
        self._probe: int | None = None
        self._by = ""

    def shape(self, shape: LinkShape, *, both_ways: bool = False) -> str:
        """Shape them all."""
        if self._control is None:
            raise RuntimeError(NO_CONTROL)
        back = [(dst, src) for src, dst in self.links] if both_ways else []
        links = list(dict.fromkeys([*self.links, *back]))
        by = self._control.shape([(self._names[src], self._names[dst]) for src, dst in links], shape)
        self._by = self._by or by
        return by

    def pace(self, bytes_per_s: float | None, latency_s: float) -> None:
        """Tell the ranks at the sources."""
        payload = {"bytes_per_s": bytes_per_s, "latency_s": latency_s}
        for source in dict.fromkeys(src for src, _ in self.links):
            self._scene.send(self._names[source], Extra(topic="pace", payload=payload))

    def cut_control(self, cut: bool) -> None:
        """As far as nodes are more than names."""
        machines = self._scene.machines
        if machines is None:
            raise RuntimeError("nodes are only names here: none can be cut off from its coordinator")
        topology = self._scene.setup.cell.scenario.topology
        for node in dict.fromkeys(topology.node_of(src) for src, _ in self.links):
            (machines.isolate if cut else machines.rejoin)(node)

    def look(self) -> Mapping[str, Any] | None:
        """What a probe measured on the first link, and by what means it is shaped."""
        if self._control is None or not self._by:
            return None
        if self._probe is None:
            src, dst = self.links[0]
            self._probe = self._control.probe((self._names[src], self._names[dst]))
        measured = self._control.probed(self._probe)
        return None if measured is None else {"link": list(self.links[0]), "by": self._by, **measured}


class LinkSite:
    """All links of a fault are one occurrence."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Sequence[Aim | Miss]:
        """Links both of whose ranks somebody holds, and that can be shaped if that is what the fault does."""
        control = self._scene.links if Need.LINKS in fault.wants() else None
        if control is None and Need.LINKS in fault.wants():
            return [Miss(who={"links": list(planned.links)}, reason=NO_CONTROL)]
        return [link_aim(self._scene, control, planned.links)]

    def reachable(self, planned: PlannedFault) -> bool:
        """Whether somebody holds every rank."""
        return all(self._scene.process_of(rank) for rank in {r for link in planned.links for r in link})


def link_aim(scene: Scene, control: LinkControl | None, links: Sequence[tuple[int, int]]) -> Aim | Miss:
    """One occurrence that hits these links, as far as their ranks are held and they can be shaped."""
    held = {rank: scene.process_of(rank) for rank in sorted({rank for link in links for rank in link})}
    names = {rank: name for rank, name in held.items() if name is not None}
    there = [link for link in links if link[0] in names and link[1] in names]
    if not there:
        return miss_rank(links[0][0] if links else -1)
    refused = {link: control.refuses((names[link[0]], names[link[1]])) for link in there} if control else {}
    usable = [link for link in there if not refused.get(link)]
    if not usable:
        return Miss(who={"links": [list(link) for link in there]}, reason=str(refused[there[0]]))
    handle = LinkHandle(scene, control, names, usable)
    who = {"links": [list(link) for link in usable], "processes": {str(r): name for r, name in names.items()}}
    first = names[usable[0][0]]
    processes = (first, *(name for name in names.values() if name != first))
    return Aim(target=handle, who=who, processes=processes, rank=usable[0][0], look=handle.look)
