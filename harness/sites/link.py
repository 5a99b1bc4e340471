"""Directed links between ranks, led through a proxy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaos.fault import Fault
from chaos.schedule import PlannedFault
from chaos.targets import LinkShape
from harness.launcher import LinkControl
from harness.scene import Scene
from harness.sites import Aim, Miss
from harness.sites.process import miss_rank


class LinkHandle:
    """Links by rank, held to the processes that held the ranks when it was made; see chaos.targets.LinkTarget.

    ``look`` measures the first of them once it is shaped.
    """

    def __init__(
        self, control: LinkControl, names: Mapping[int, str], links: Sequence[tuple[int, int]]
    ) -> None:
        self.links = links
        self._control = control
        self._names = names
        self._probe: int | None = None

    def shape(self, shape: LinkShape, *, both_ways: bool = False) -> None:
        """Shape them all."""
        back = [(dst, src) for src, dst in self.links] if both_ways else []
        links = list(dict.fromkeys([*self.links, *back]))
        self._control.shape([(self._names[src], self._names[dst]) for src, dst in links], shape)

    def look(self) -> Mapping[str, Any] | None:
        """What a probe measured on the first link."""
        if self._probe is None:
            src, dst = self.links[0]
            self._probe = self._control.probe((self._names[src], self._names[dst]))
        measured = self._control.probed(self._probe)
        return None if measured is None else {"link": list(self.links[0]), **measured}


class LinkSite:
    """All links of a fault are one occurrence."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Sequence[Aim | Miss]:
        """Links both of whose ranks somebody holds."""
        control = self._scene.links
        if control is None:
            return [Miss(who={"links": list(planned.links)}, reason="no link leads through a proxy here")]
        return [link_aim(self._scene, control, planned.links)]

    def reachable(self, planned: PlannedFault) -> bool:
        """Whether somebody holds every rank."""
        return all(self._scene.process_of(rank) for rank in {r for link in planned.links for r in link})


def link_aim(scene: Scene, control: LinkControl, links: Sequence[tuple[int, int]]) -> Aim | Miss:
    """One occurrence that hits these links, as far as their ranks are held."""
    held = {rank: scene.process_of(rank) for rank in sorted({rank for link in links for rank in link})}
    names = {rank: name for rank, name in held.items() if name is not None}
    there = [link for link in links if link[0] in names and link[1] in names]
    if not there:
        return miss_rank(links[0][0] if links else -1)
    handle = LinkHandle(control, names, there)
    who = {"links": [list(link) for link in there], "processes": {str(r): name for r, name in names.items()}}
    first = names[there[0][0]]
    processes = (first, *(name for name in names.values() if name != first))
    return Aim(target=handle, who=who, processes=processes, rank=there[0][0], look=handle.look)
