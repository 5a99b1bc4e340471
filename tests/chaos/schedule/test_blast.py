"""The blast radius as a pure function, and conditions on landed evidence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fault_fakes import kind_of
from trainchaos.chaos.fault.base import Need, Where
from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.chaos.scenario.model import BlastRadius
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.scenario.verify import complaint, unmet
from trainchaos.chaos.schedule.blast import (
    Damage,
    Privilege,
    may_need,
    nodes_hit,
    privilege,
    ranks_hit,
    refusal,
)
from trainchaos.chaos.schedule.plan import plan
from trainchaos.chaos.schedule.targeting import Scope


def refused(
    limits: dict[str, Any],
    *,
    active: int = 0,
    healthy: int = 4,
    ranks: tuple[int, ...] = (2,),
    disables: bool = True,
) -> str | None:
    damage = Damage(active=active, healthy=healthy)
    return refusal(BlastRadius.model_validate(limits), damage, ranks=ranks, disables=disables)


def test_no_limits_no_refusal() -> None:
    assert refused({}, active=9, healthy=1, ranks=(0, 1, 2, 3)) is None


def test_each_limit() -> None:
    assert refused({"max_concurrent_faults": 2}, active=1) is None
    assert (
        refused({"max_concurrent_faults": 2}, active=2)
        == "blast_radius allows 2 at once, and 2 are active"
    )
    assert refused({"min_healthy_replicas": 3}) is None
    assert refused({"min_healthy_replicas": 3}, healthy=3) == (
        "blast_radius keeps 3 replicas healthy, and of 3 this would leave 2"
    )
    assert refused({"min_healthy_replicas": 4}, disables=False) is None
    assert refused({"protected_ranks": [2, 3]}) == "blast_radius protects rank 2"


@given(st.integers(0, 8), st.integers(1, 8), st.integers(0, 8))
def test_what_is_allowed_leaves_enough(healthy: int, hit: int, least: int) -> None:
    reason = refused({"min_healthy_replicas": least}, healthy=healthy, ranks=tuple(range(hit)))
    assert (reason is None) == (healthy - hit >= least)


def test_privileges() -> None:
    assert privilege({Need.NODES, Need.MOUNT}) == "root" and privilege({Need.LINKS}) == "none"
    assert may_need(BlastRadius(), {Need.MOUNT})
    assert not may_need(BlastRadius(privileges="net_admin"), {Need.MOUNT})
    assert may_need(BlastRadius(privileges="none"), {Need.NODES})


def test_a_launcher_that_meets_a_need_by_other_means_has_its_own_costs() -> None:
    costs: dict[Need, Privilege] = {Need.MEMORY: "none", Need.LINKS: "net_admin"}
    assert privilege({Need.MEMORY}) == "root" and privilege({Need.MEMORY}, costs) == "none"
    assert privilege({Need.LINKS, Need.MEMORY}, costs) == "net_admin"
    assert may_need(BlastRadius(privileges="net_admin"), {Need.LINKS, Need.MEMORY}, costs)
    assert not may_need(BlastRadius(privileges="none"), {Need.LINKS}, costs)


def test_nodes_are_kept_from_harm() -> None:
    some = Damage(active=1, healthy=4, nodes=frozenset({0}))

    def asked(
        limits: dict[str, Any], *, disables: bool = True, whole: tuple[int, ...] = (2,)
    ) -> str | None:
        return refusal(
            BlastRadius.model_validate(limits),
            some,
            ranks=(3,),
            disables=disables,
            nodes=(1, 2),
            whole=whole,
        )

    assert asked({"protected_nodes": [0]}) is None
    assert asked({"protected_nodes": [2, 3]}) == "blast_radius protects node 2"
    assert asked({"max_nodes_lost": 2}) is None
    assert (
        asked({"max_nodes_lost": 1})
        == "blast_radius allows 1 nodes lost at once, and this would make 2"
    )
    assert asked({"max_nodes_lost": 1}, whole=(0,)) is None, "lost already"
    assert asked({"max_nodes_lost": 1}, whole=()) is None, "a rank of it is no node"
    assert asked({"max_nodes_lost": 1}, disables=False) is None


def test_nodes_that_a_fault_touches() -> None:
    place = Topology(ranks=4, nodes=3)

    def touched(target: dict[str, Any], where: Where = Where.PROCESS) -> frozenset[int]:
        fault = FaultSpec.model_validate(
            {"id": "f", "kind": "k", "at": {"step": 1}, "target": target}
        )
        (planned,) = plan([fault], {"k": kind_of(where)}, Scope(topology=place, spares=2), 1)
        return nodes_hit(planned, where, place)

    assert touched({"rank": 3}) == {1}
    assert touched({"role": "spare", "select": "all"}) == {2}
    assert touched({"node": 2}, Where.NODE) == {2}


def test_a_lost_node_takes_its_ranks() -> None:
    fault = FaultSpec.model_validate(
        {"id": "f", "kind": "k", "at": {"step": 1}, "target": {"node": 1}}
    )
    place = Topology(ranks=4, nodes=2)
    (planned,) = plan([fault], {"k": kind_of(Where.NODE)}, Scope(topology=place), 1)
    assert ranks_hit(planned, Where.NODE, place) == {2, 3}
    assert ranks_hit(planned, Where.HEALTH, place) == frozenset()


EVIDENCE = {"mbit_per_s": 25.0, "signal": "SIGKILL", "code": -9, "link": {"lost": 0.1}, "oom": True}


@pytest.mark.parametrize(
    "verify",
    [
        {"mbit_per_s": "< 30"},
        {"mbit_per_s": ">= 25"},
        {"signal": "SIGKILL"},
        {"signal": "== SIGKILL"},
        {"code": -9},
        {"code": "== -9"},
        {"link.lost": "<= 0.1"},
        {"oom": True},
        {"oom": "true"},
        {},
    ],
)
def test_evidence_that_meets_its_conditions(verify: dict[str, Any]) -> None:
    assert unmet(verify, EVIDENCE) is None


@pytest.mark.parametrize(
    ("verify", "why"),
    [
        ({"mbit_per_s": "< 20"}, "mbit_per_s is 25.0, and must be < 20"),
        ({"signal": "SIGTERM"}, "signal is 'SIGKILL', and must be SIGTERM"),
        ({"signal": "< 3"}, "signal is 'SIGKILL', and must be < 3"),
        ({"oom": False}, "oom is True, and must be False"),
        (
            {"link.late": 1},
            "the evidence has no 'link.late' (it has: code, link, mbit_per_s, oom, signal)",
        ),
    ],
)
def test_evidence_that_does_not(verify: dict[str, Any], why: str) -> None:
    assert unmet(verify, EVIDENCE) == why


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("< 30", ""),
        ("SIGKILL", ""),
        (3, ""),
        (True, ""),
        ("<> 3", "unknown comparison '<>'; use one of <, <=, >, >=, =="),
        ("<", "nothing follows '<': write '< 30'"),
        ("< fast", "'fast' is not a number to compare with"),
        ([1], "a condition is a value, or a comparison such as '< 30'"),
    ],
)
def test_conditions_that_cannot_be_read(wanted: Any, said: str) -> None:
    assert complaint(wanted) == said
