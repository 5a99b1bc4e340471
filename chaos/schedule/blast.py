"""Checks whether one more occurrence stays within a scenario's blast radius. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainchaos.chaos.fault.base import Need, Where
from trainchaos.chaos.scenario.model import BlastRadius
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.plan import PlannedFault

Privilege = Literal["none", "net_admin", "root"]
PRIVILEGES: tuple[Privilege, ...] = ("none", "net_admin", "root")
"""From the least to the most."""
NO_COSTS: Mapping[Need, Privilege] = {}
_NEEDED: Mapping[Need, Privilege] = {
    Need.MOUNT: "root",
    Need.CGROUP: "root",
    Need.MEMORY: "root",
    Need.QUOTA: "root",
}


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Current damage. ``active``: number of faults injected and neither healed nor recovered from;
    ``healthy``: number of replicas that train or could train at once; ``nodes``: nodes lost or
    stopped as a whole.
    """

    active: int
    healthy: int
    nodes: frozenset[int] = frozenset()


def privilege(needs: Collection[Need], costs: Mapping[Need, Privilege] = NO_COSTS) -> Privilege:
    """The privilege that a fault kind with these needs requires on this machine. ``costs``: a
    launcher's own privileges for needs it meets by unusual means.
    """
    due = (costs.get(need, _NEEDED.get(need, "none")) for need in needs)
    return max(due, key=PRIVILEGES.index, default="none")


def may_need(
    limits: BlastRadius, needs: Collection[Need], costs: Mapping[Need, Privilege] = NO_COSTS
) -> bool:
    """Whether the privileges that a fault kind needs are allowed."""
    if limits.privileges is None:
        return True
    return PRIVILEGES.index(privilege(needs, costs)) <= PRIVILEGES.index(limits.privileges)


def ranks_hit(fault: PlannedFault, where: Where | None, topology: Topology) -> frozenset[int]:
    """The ranks an occurrence hits; for a link fault, the source ranks."""
    if where is Where.HEALTH:
        return frozenset()
    on_nodes = (rank for node in fault.nodes for rank in topology.ranks_on(node))
    return frozenset((*fault.ranks, *on_nodes))


def nodes_hit(fault: PlannedFault, where: Where | None, topology: Topology) -> frozenset[int]:
    """The nodes on which an occurrence hits anything."""
    ranks = (topology.node_of(rank) for rank in ranks_hit(fault, where, topology))
    spares = (topology.node_of_spare(index) for index in fault.spares)
    return frozenset((*fault.nodes, *ranks, *spares)) if where is not Where.HEALTH else frozenset()


def refusal(
    limits: BlastRadius,
    damage: Damage,
    *,
    ranks: Collection[int],
    disables: bool,
    shards: int = 1,
    nodes: Collection[int] = (),
    whole: Collection[int] = (),
) -> str | None:
    """Why one more occurrence may not fire; None when it may.

    ``ranks``: ranks hit; ``disables``: whether they become unhealthy (a slow link does not disable
    them); ``shards``: ranks per replica, where losing one breaks the replica; ``nodes``: nodes on
    which it hits anything; ``whole``: nodes it takes entirely.
    """
    protected = sorted(set(ranks) & set(limits.protected_ranks))
    if protected:
        return f"blast_radius protects rank {', '.join(map(str, protected))}"
    if sheltered := sorted(set(nodes) & set(limits.protected_nodes)):
        return f"blast_radius protects node {', '.join(map(str, sheltered))}"
    lost = damage.nodes | set(whole)
    if (
        disables
        and whole
        and limits.max_nodes_lost is not None
        and len(lost) > limits.max_nodes_lost
    ):
        return (
            f"blast_radius allows {limits.max_nodes_lost} nodes lost at once, and this would make"
            f" {len(lost)}"
        )
    most = limits.max_concurrent_faults
    if most is not None and damage.active >= most:
        return f"blast_radius allows {most} at once, and {damage.active} are active"
    least = limits.min_healthy_replicas
    left = damage.healthy - (len({rank // shards for rank in ranks}) if disables else 0)
    if least is not None and disables and left < least:
        return (
            f"blast_radius keeps {least} replicas healthy, and of {damage.healthy} this would leave"
            f" {max(0, left)}"
        )
    return None


def together(planned: Sequence[PlannedFault]) -> Iterator[tuple[int, tuple[PlannedFault, ...]]]:
    """Steps at which several faults are due or still active, each with these faults, newest last.

    Considers only what is known beforehand: triggers and durations in steps.
    """
    spans = [
        (step, step + max(0, (fault.duration_steps or 1) - 1), fault)
        for fault in planned
        for step, _ in fault.points
    ]
    for step in sorted({start for start, _, _ in spans}):
        there = sorted((s for s in spans if s[0] <= step <= s[1]), key=lambda span: span[0])
        faults = tuple(dict.fromkeys(fault.id for _, _, fault in there))
        if len(faults) > 1:
            by_id = {fault.id: fault for _, _, fault in there}
            yield step, tuple(by_id[name] for name in faults)
