"""Directed links between ranks, shaped by a proxy or by the kernel between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from trainchaos.chaos.fault.base import Fault, Need
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import Aims, MissingTarget, OccurrenceTarget, Site, miss_rank
from trainchaos.harness.launch.launcher import LinkControl
from trainchaos.recovery.transport.wire import Extra

NO_CONTROL = "no link can be shaped here"


class LinkHandle:
    """Links by rank, bound to the processes that held the ranks when it was made; see
    chaos.fault.targets.LinkTarget.

    ``look`` probes the first link once it is shaped. ``control``: None where links cannot be
    shaped.
    """

    def __init__(
        self,
        scene: Scene,
        control: LinkControl | None,
        names: Mapping[int, str],
        links: Sequence[tuple[int, int]],
    ) -> None:
        self.links = links
        self._scene = scene
        self._control = control
        self._names = names
        self._probe: int | None = None
        self._by = ""

    def shape(self, shape: LinkShape, *, both_ways: bool = False) -> str:
        """Shape all links, combined with what other faults do to them."""
        if self._control is None:
            raise RuntimeError(NO_CONTROL)
        back = [(dst, src) for src, dst in self.links] if both_ways else []
        alike: dict[LinkShape, list[tuple[str, str]]] = {}
        for src, dst in dict.fromkeys([*self.links, *back]):
            link = self._names[src], self._names[dst]
            alike.setdefault(self._wanted(link, shape), []).append(link)
        by = ""
        for each, links in alike.items():
            by = self._control.shape(links, each) or by
        self._by = self._by or by
        return by

    def _wanted(self, link: tuple[str, str], shape: LinkShape) -> LinkShape:
        """The shape a link must have now, combining what all active faults want."""
        assert self._control is not None
        over, of = self._control.over(link), self._scene.in_force
        open_ = shape == LinkShape()
        all_ = (
            of.end("shaped", over, id(self)) if open_ else of.begin("shaped", over, id(self), shape)
        )
        return reduce(lambda before, one: one.over(before), all_, LinkShape())

    def pace(self, bytes_per_s: float | None, latency_s: float) -> None:
        """Send the ranks at the sources the lowest rate of all active faults, and the sum of their
        latencies.
        """
        of = self._scene.in_force
        for source in dict.fromkeys(src for src, _ in self.links):
            name = self._names[source]
            if bytes_per_s is None:
                left = of.end("paced", name, id(self))
            else:
                left = of.begin("paced", name, id(self), (bytes_per_s, latency_s))
            rate, wait_s = (
                min((each for each, _ in left), default=None),
                sum(each for _, each in left),
            )
            self._scene.send(
                name, Extra(topic="pace", payload={"bytes_per_s": rate, "latency_s": wait_s})
            )

    def cut_control(self, cut: bool) -> None:
        """Cut the source nodes off from their coordinator, or reconnect them; needs machines."""
        machines = self._scene.surface.machines
        if machines is None:
            raise RuntimeError(
                "nodes are only names here: none can be cut off from its coordinator"
            )
        topology = self._scene.setup.cell.scenario.topology
        of = self._scene.in_force
        for node in dict.fromkeys(topology.node_of(src) for src, _ in self.links):
            if cut:
                of.begin("cut off", node, id(self))
                machines.isolate(node)
            elif not of.end("cut off", node, id(self)):
                machines.rejoin(node)

    def look(self) -> Mapping[str, Any] | None:
        """What a probe measured on the first link, and the mechanism that shapes it."""
        if self._control is None or not self._by:
            return None
        if self._probe is None:
            src, dst = self.links[0]
            self._probe = self._control.probe((self._names[src], self._names[dst]))
        measured = self._control.probed(self._probe)
        return (
            None if measured is None else {"link": list(self.links[0]), "by": self._by, **measured}
        )


class LinkSite(Site):
    """Finds the links of a fault, all of which are one occurrence."""

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """The links whose two ranks are both held, and that can be shaped if the fault shapes
        links.
        """
        control = self._scene.surface.links if Need.LINKS in fault.wants() else None
        if control is None and Need.LINKS in fault.wants():
            return [MissingTarget(who={"links": list(planned.links)}, reason=NO_CONTROL)]
        return [link_aim(self._scene, control, planned.links)]

    def reachable(self, planned: PlannedFault) -> bool:
        return self._all_held({rank for link in planned.links for rank in link})


def link_aim(
    scene: Scene, control: LinkControl | None, links: Sequence[tuple[int, int]]
) -> OccurrenceTarget | MissingTarget:
    """One occurrence that hits those of the links whose ranks are held and that can be shaped."""
    held = {
        rank: scene.process_of(rank) for rank in sorted({rank for link in links for rank in link})
    }
    names = {rank: name for rank, name in held.items() if name is not None}
    there = [link for link in links if link[0] in names and link[1] in names]
    if not there:
        return miss_rank(links[0][0] if links else -1)
    refused = (
        {link: control.refuses((names[link[0]], names[link[1]])) for link in there}
        if control
        else {}
    )
    usable = [link for link in there if not refused.get(link)]
    if not usable:
        return MissingTarget(
            who={"links": [list(link) for link in there]}, reason=str(refused[there[0]])
        )
    handle = LinkHandle(scene, control, names, usable)
    who = {
        "links": [list(link) for link in usable],
        "processes": {str(r): name for r, name in names.items()},
    }
    first = names[usable[0][0]]
    processes = (first, *(name for name in names.values() if name != first))
    return OccurrenceTarget(
        target=handle, who=who, processes=processes, rank=usable[0][0], look=handle.look
    )
