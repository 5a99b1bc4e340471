"""The nodes that an arm's first processes start on: as the topology says, and around tainted
places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from trainchaos.chaos.scenario.model import Cell
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.recovery.health.taints import WHAT_TO_DO, Taint, listed


@dataclass(frozen=True, kw_only=True)
class Tainted:
    """What of an arm's places is tainted. ``nodes``: as a whole, or all their devices; ``devices``:
    as ``Cluster.places_on`` names them; ``room``: processes that a node takes, where taints limit
    that; ``taints``: those that mean a place of the arm.
    """

    nodes: frozenset[int] = frozenset()
    devices: frozenset[str] = frozenset()
    room: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    taints: tuple[Taint, ...] = ()


UNTAINTED = Tainted()


@dataclass(frozen=True, kw_only=True)
class Seats:
    """The node of each rank, and of each spare."""

    workers: tuple[int, ...]
    spares: tuple[int, ...]

    @property
    def full(self) -> Counter[int]:
        """Processes of each node."""
        return Counter((*self.workers, *self.spares))


def tainted_places(
    taints: Sequence[Taint],
    names: Mapping[int, Collection[str]],
    places: Mapping[int, Sequence[str]],
) -> Tainted:
    """What is tainted of an arm's nodes. ``names``: by which each node is known; ``places``: its
    devices, as the cluster names them. A GPU is not shared because another one is tainted: where
    some are, a node takes as many processes as GPUs are left.
    """
    nodes, devices, meant = set[int](), set[str](), dict[int, Taint]()
    room = dict[int, int]()
    for node, there in places.items():
        bad, whole = set[str](), False
        for index, taint in enumerate(taints):
            its = {p for p in there if taint.device and taint.means(names[node], torch_place(p))}
            of_node = taint.means(names[node])
            bad, whole = bad | its, whole or of_node
            if its or of_node:
                meant[index] = taint
        devices |= bad
        if whole or (there and bad.issuperset(there)):
            nodes.add(node)
            room[node] = 0
        elif bad and any(place.startswith("cuda") for place in there):
            room[node] = len(there) - len(bad)
    return Tainted(
        nodes=frozenset(nodes),
        devices=frozenset(devices),
        room=room,
        taints=tuple(meant[index] for index in sorted(meant)),
    )


def torch_place(place: str) -> str:
    """A device as a taint names it: ``cuda:3@n1`` is ``cuda:3``, and ``cpu:1`` itself."""
    return place.partition("@")[0]


def rooms(topology: Topology, *, spares: int) -> Counter[int]:
    """Processes that each node takes: those it begins with, or a node's share of ranks, if it has
    none.
    """
    full = planned(topology, spares=spares).full
    return full | Counter(dict.fromkeys(topology.spare_nodes, topology.ranks_per_node))


def planned(topology: Topology, *, spares: int) -> Seats:
    """The seats that the topology says."""
    return Seats(
        workers=tuple(topology.node_of(rank) for rank in range(topology.ranks)),
        spares=tuple(topology.node_of_spare(index) for index in range(spares)),
    )


def seats(topology: Topology, *, spares: int, room: Mapping[int, int]) -> Seats | None:
    """The seats where some nodes take only ``room`` processes; None: not all find one. Who has no
    seat as planned gets one on the first node that has room, ranks first.
    """
    first = planned(topology, spares=spares)
    most = rooms(topology, spares=spares)
    left = {node: min(count, room.get(node, count)) for node, count in most.items()}
    found: list[int | None] = []
    for node in (*first.workers, *first.spares):
        has = left[node] > 0
        left[node] -= has
        found.append(node if has else None)
    for index, seat in enumerate(found):
        if seat is None:
            free = [other for other in sorted(left) if left[other] > 0]
            if not free:
                return None
            left[free[0]] -= 1
            found[index] = free[0]
    seated = tuple(node for node in found if node is not None)
    return Seats(workers=seated[: topology.ranks], spares=seated[topology.ranks :])


def shortage(
    cell: Cell, tainted: Tainted, places: Mapping[int, Sequence[str]], *, spares: int
) -> str | None:
    """Why the processes of a cell have no place because of taints, and what to do; None: they have
    one. ``places``: devices of each node.
    """
    if not tainted.taints:
        return None
    topology = cell.scenario.topology
    wanted = topology.ranks + spares
    every = {place for there in places.values() for place in there}
    gpus = {place for place in every if place.startswith("cuda")}
    free = gpus - tainted.devices
    kept = rooms(topology, spares=spares)
    have = sum(min(count, tainted.room.get(node, count)) for node, count in kept.items())
    if every <= tainted.devices or set(places) <= tainted.nodes:
        lacks = "every place is tainted"
    elif len(gpus) >= wanted > len(free):
        lacks = f"{wanted} processes need a GPU each, and {len(free)} are not tainted"
    elif tainted.room and len(places) > 1 and have < wanted:
        lacks = f"{wanted} processes are to start, and nodes that are not tainted take {have}"
    else:
        return None
    return f"{lacks}: {listed(tainted.taints)}; {WHAT_TO_DO}"
