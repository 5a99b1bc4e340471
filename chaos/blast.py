"""How much may be broken at once: whether one more occurrence keeps to a scenario's blast radius. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from chaos.fault import Need, Where
from chaos.scenario import BlastRadius
from chaos.schedule import PlannedFault
from chaos.topology import Topology

Privilege = Literal["none", "net_admin", "root"]
PRIVILEGES: tuple[Privilege, ...] = ("none", "net_admin", "root")
"""From the least to the most."""
_NEEDED: Mapping[Need, Privilege] = MappingProxyType(
    {Need.MOUNT: "root", Need.CGROUP: "root", Need.MEMORY: "root", Need.QUOTA: "root"}
)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is broken now. ``active``: faults injected and neither healed nor recovered from; ``healthy``:
    replicas that train or could at once.
    """

    active: int
    healthy: int


def privilege(needs: Collection[Need]) -> Privilege:
    """What a fault kind with these needs must be allowed on this machine."""
    return max((_NEEDED.get(need, "none") for need in needs), key=PRIVILEGES.index, default="none")


def may_need(limits: BlastRadius, needs: Collection[Need]) -> bool:
    """Whether the privileges that a fault kind needs are allowed."""
    if limits.privileges is None:
        return True
    return PRIVILEGES.index(privilege(needs)) <= PRIVILEGES.index(limits.privileges)


def ranks_hit(fault: PlannedFault, where: Where | None, topology: Topology) -> frozenset[int]:
    """The ranks that an occurrence touches; for a fault of a link, those at its source."""
    if where is Where.HEALTH:
        return frozenset()
    on_nodes = (rank for node in fault.nodes for rank in topology.ranks_on(node))
    return frozenset((*fault.ranks, *on_nodes))


def refusal(
    limits: BlastRadius, damage: Damage, *, ranks: Collection[int], disables: bool, shards: int = 1
) -> str | None:
    """Why one more occurrence may not fire; None when it may.

    ``ranks``: whom it hits; ``disables``: whether they stop being healthy by it (a slow link does not); ``shards``:
    ranks of a replica, of which one breaks it.
    """
    protected = sorted(set(ranks) & set(limits.protected_ranks))
    if protected:
        return f"blast_radius protects rank {', '.join(map(str, protected))}"
    most = limits.max_concurrent_faults
    if most is not None and damage.active >= most:
        return f"blast_radius allows {most} at once, and {damage.active} are active"
    least = limits.min_healthy_replicas
    left = damage.healthy - (len({rank // shards for rank in ranks}) if disables else 0)
    if least is not None and disables and left < least:
        return f"blast_radius keeps {least} replicas healthy, and of {damage.healthy} this would leave {max(0, left)}"
    return None


def together(planned: Sequence[PlannedFault]) -> Iterator[tuple[int, tuple[PlannedFault, ...]]]:
    """Steps at which more than one fault is due or still lasts, each with those faults, the newest last.

    Only what is certain beforehand: triggers in steps, and durations in steps.
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
