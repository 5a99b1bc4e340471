"""Checks that the ranks, nodes and replicas protected by a scenario exist.

A typing error there would silently leave a rank unprotected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainchaos.chaos.scenario.fault import Exclusion
from trainchaos.chaos.scenario.model import BlastRadius
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.source.diagnostics import Loc, Problem


def check_limits(limits: BlastRadius, place: Topology) -> Iterator[Problem]:
    """Check ranks, nodes and replicas named by the blast radius."""
    yield from _missing(
        "rank", limits.protected_ranks, place.ranks, ("blast_radius", "protected_ranks")
    )
    yield from _missing(
        "node", limits.protected_nodes, place.nodes, ("blast_radius", "protected_nodes")
    )
    least = limits.min_healthy_replicas
    if least is not None and least > place.replicas:
        message = f"there are only {place.replicas} replicas, so {least} cannot be healthy"
        yield Problem(("blast_radius", "min_healthy_replicas"), message)


def check_excluded(exclude: Exclusion, place: Topology, loc: Loc) -> Iterator[Problem]:
    """Check ranks and nodes excluded by a fault's target. ``loc``: of ``exclude``."""
    yield from _missing("rank", exclude.ranks, place.ranks, (*loc, "ranks"))
    yield from _missing("node", exclude.nodes, place.nodes, (*loc, "nodes"))


def possible(limits: BlastRadius, place: Topology) -> BlastRadius:
    """The limits without an impossible one, which is reported once instead of for every fault."""
    least = limits.min_healthy_replicas
    return (
        limits
        if least is None or least <= place.replicas
        else limits.model_copy(update={"min_healthy_replicas": None})
    )


def missing(what: str, number: int, there: int) -> str:
    """The message that a rank or node does not exist, with those that do."""
    only = (
        f"{what} 0 is the only one"
        if there == 1
        else f"with {there} {what}s they go from 0 to {there - 1}"
    )
    return f"there is no {what} {number}: {only}"


def _missing(what: str, numbers: Sequence[int], there: int, loc: Loc) -> Iterator[Problem]:
    for index, number in enumerate(numbers):
        if number >= there:
            yield Problem((*loc, index), missing(what, number, there))
