"""Chooses a fault's targets: candidates by role, node and rack, and a seeded choice among them.

Candidates are ordered by a digest of (seed, fault id, candidate), so choosing n + 1 only adds one
to the n chosen, and no other fault changes the choice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.scenario.fault import CountTarget, FaultSpec, PercentTarget, TargetSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.arrivals import draws
from trainchaos.chaos.source.diagnostics import Loc

PLACELESS = (Where.CHECKPOINT, Where.STORAGE, Where.STORE, Where.COORDINATOR)
"""Places that exist once per job: their faults choose no rank, spare or node."""
_OF_TRAINING = (Where.RANK, Where.LINK)
"""Places where only training ranks can be hit, even with ``role: any``."""

Who = tuple[str, int]
"""``worker``, ``spare``, ``node`` or ``rack``, and its number."""


class TargetError(ValueError):
    """No target can be hit. ``part``: the key below ``target`` that causes this."""

    def __init__(self, message: str, part: Loc = ()) -> None:
        super().__init__(message)
        self.part = part


@dataclass(frozen=True, kw_only=True)
class Scope:
    """All possible targets. ``protected``, ``sheltered``: ranks and nodes protected by the blast
    radius.
    """

    topology: Topology
    spares: int = 0
    protected: frozenset[int] = frozenset()
    sheltered: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What one fault hits: ranks, indices of spares, nodes, and directed links (source rank,
    destination rank).
    """

    ranks: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()


def resolve(fault: FaultSpec, kind: type[Fault], scope: Scope, seed: int) -> Targets:
    """Choose the targets. Raises TargetError if there are none, or not enough."""
    target, where = fault.target, kind.where
    if kind.role is not None:
        target = target.model_copy(update={"role": kind.role})
    if target.checkpoint is not None or where in PLACELESS:
        _check_place(target, scope.topology)
        return Targets(ranks=() if target.rank is None else (target.rank,))
    _check_place(target, scope.topology)
    if where in _OF_TRAINING:
        scope = replace(scope, spares=0)
    if where is Where.NODE or (where is Where.HEALTH and _names_place(target)):
        return Targets(nodes=_nodes(fault, kind, scope, seed))
    if target.link is not None:
        return _link(target, scope)
    chosen = _select(
        fault, _people(target, scope), _harmed(target, scope), seed, _role_word(target)
    )
    ranks = tuple(number for role, number in chosen if role == "worker")
    spares = tuple(number for role, number in chosen if role == "spare")
    links = _links(ranks, scope.topology.ranks, kind.separates) if where is Where.LINK else ()
    if where is Where.LINK and not links:
        raise TargetError("a link needs a rank on its other side", ("select",))
    return Targets(ranks=ranks, spares=spares, links=links)


def _names_place(target: TargetSpec) -> bool:
    return target.rank is None and (target.node is not None or target.rack is not None)


def _check_place(target: TargetSpec, topology: Topology) -> None:
    for name, value, there in (
        ("rank", target.rank, topology.ranks),
        ("replica", target.replica, topology.replicas),
        ("node", target.node, topology.nodes),
        ("rack", target.rack, topology.racks),
    ):
        if value is not None and value >= there:
            among = f"among {there}" + ("; set launcher.nodes" if name in ("node", "rack") else "")
            raise TargetError(f"there is no {name} {value} {among}", (name,))


def _people(target: TargetSpec, scope: Scope) -> list[Who]:
    topology = scope.topology
    if (named := _named(target, topology)) is not None:
        return [("worker", rank) for rank in named]
    people: list[Who] = []
    if target.role in ("worker", "any"):
        people += [("worker", rank) for rank in range(topology.ranks)]
    if target.role == "launcher":
        return [("spare", 0)]  # the one process of a command that is no rank
    if target.role in ("spare", "any"):
        people += [("spare", index) for index in range(scope.spares)]
    if target.node is None and target.rack is None:
        return people
    return [who for who in people if _on(target, _node_of(who, topology), topology)]


def _named(target: TargetSpec, topology: Topology) -> tuple[int, ...] | None:
    """The ranks named by the target, if it names any."""
    if target.rank is not None:
        return (target.rank,)
    return None if target.replica is None else topology.ranks_of(target.replica)


def _node_of(who: Who, topology: Topology) -> int:
    return topology.node_of(who[1]) if who[0] == "worker" else topology.node_of_spare(who[1])


def _on(target: TargetSpec, node: int, topology: Topology) -> bool:
    return target.node in (None, node) and target.rack in (None, topology.rack_of(node))


def _harmed(target: TargetSpec, scope: Scope) -> set[Who]:
    """Candidates that must not be chosen."""
    topology = scope.topology
    out: set[Who] = {("worker", rank) for rank in (*target.exclude.ranks, *scope.protected)}
    for node in (*target.exclude.nodes, *scope.sheltered):
        out |= {("worker", rank) for rank in topology.ranks_on(node)}
        out |= {("spare", i) for i in range(scope.spares) if topology.node_of_spare(i) == node}
    return out


def _nodes(fault: FaultSpec, kind: type[Fault], scope: Scope, seed: int) -> tuple[int, ...]:
    target, topology = fault.target, scope.topology
    named = _named(target, topology)
    nodes = [node for node in range(topology.nodes) if _on(target, node, topology)]
    if named is not None:
        nodes = sorted({topology.node_of(rank) for rank in named})
    kept, out = {*target.exclude.ranks, *scope.protected}, {*target.exclude.nodes, *scope.sheltered}
    spared = {n for n in nodes if n in out or kept & set(topology.ranks_on(n))}
    if not kind.whole_racks:
        chosen = _select(
            fault, [("node", n) for n in nodes], {("node", n) for n in spared}, seed, "node"
        )
        return tuple(number for _, number in chosen)
    racks = sorted({topology.rack_of(node) for node in nodes})
    spared_racks = {("rack", topology.rack_of(node)) for node in spared}
    chosen = _select(fault, [("rack", rack) for rack in racks], spared_racks, seed, "rack")
    return tuple(node for _, rack in chosen for node in topology.nodes_in(rack))


def _select(
    fault: FaultSpec, group: Sequence[Who], out: set[Who], seed: int, word: str
) -> list[Who]:
    """The chosen members of a group, ordered by number. ``out``: members never chosen."""
    if not group:
        raise TargetError(f"there is no {word} to select from", ("role",))
    free = [who for who in group if who not in out]
    if not free:
        raise TargetError(f"every {word} it could hit is excluded or protected", ("exclude",))
    count = len(free) if fault.target.select == "all" else _wanted(fault.target, len(group), word)
    if count > len(free):
        also = (
            f" ({len(group) - len(free)} excluded or protected)" if len(free) < len(group) else ""
        )
        part: dict[type, Loc] = {
            CountTarget: ("select", "count"),
            PercentTarget: ("select", "percent"),
        }
        where = part.get(type(fault.target.select), ("select",))
        raise TargetError(f"cannot select {count} of {len(free)}{also}", where)
    drawn = zip(draws((seed, fault.id, "target"), free), free, strict=True)
    ordered = heapq.nsmallest(count, drawn, key=lambda pair: pair[0])
    return sorted((who for _, who in ordered), key=lambda who: who[1])


def _wanted(target: TargetSpec, size: int, word: str) -> int:
    select = target.select
    if isinstance(select, CountTarget):
        return select.count
    if isinstance(select, PercentTarget):
        return max(1, math.ceil(round(select.percent / 100 * size, 9)))
    if select == "majority":
        return size // 2 + 1
    if select == "minority":
        if size < 3:
            raise TargetError(
                f"{size} {word}{'s' if size > 1 else ''} have no minority; it takes 3", ("select",)
            )
        return (size - 1) // 2
    return 1


def _link(target: TargetSpec, scope: Scope) -> Targets:
    link, ranks = target.link, scope.topology.ranks
    assert link is not None
    for name, rank in (("src", link.src), ("dst", link.dst)):
        if rank is not None and rank >= ranks:
            raise TargetError(f"there is no rank {rank} among {ranks}", ("link", name))
    if link.src == link.dst:
        raise TargetError(f"a rank has no link to itself (rank {link.src})", ("link", "dst"))
    others = [link.dst] if link.dst is not None else [r for r in range(ranks) if r != link.src]
    if not others:
        raise TargetError("a link needs a rank on its other side", ("link",))
    return Targets(ranks=(link.src,), links=tuple((link.src, other) for other in others))


def _links(chosen: Sequence[int], ranks: int, separates: bool) -> tuple[tuple[int, int], ...]:
    return tuple(
        (source, other)
        for source in chosen
        for other in range(ranks)
        if other != source and not (separates and other in chosen)
    )


def _role_word(target: TargetSpec) -> str:
    word = "rank or spare" if target.role == "any" else target.role
    if target.node is not None:
        return f"{word} on node {target.node}"
    return f"{word} in rack {target.rack}" if target.rack is not None else word
