"""Whom a fault hits: candidates, shares, exclusions, nodes, racks and links."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fault_fakes import kind_of
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.arrivals import draw, draws
from trainchaos.chaos.schedule.targeting import Scope, TargetError, Targets, resolve

PLACE = Topology(ranks=8, nodes=4, nodes_per_rack=2)  # two ranks on a node, two nodes in a rack
PROCESS, NODE, LINK = (
    kind_of(Where.PROCESS),
    kind_of(Where.NODE),
    kind_of(Where.LINK),
)


def hit(
    target: dict[str, Any],
    kind: type[Fault] = PROCESS,
    *,
    place: Topology = PLACE,
    seed: int = 1,
    spares: int = 0,
    protected: frozenset[int] = frozenset(),
    name: str = "f",
    sheltered: frozenset[int] = frozenset(),
) -> Targets:
    fault = FaultSpec.model_validate({"id": name, "kind": "k", "at": {"step": 5}, "target": target})
    scope = Scope(topology=place, spares=spares, protected=protected, sheltered=sheltered)
    return resolve(fault, kind, scope, seed)


def refusal(
    target: dict[str, Any], kind: type[Fault] = PROCESS, **more: Any
) -> tuple[str, tuple[str | int, ...]]:
    with pytest.raises(TargetError) as raised:
        hit(target, kind, **more)
    return str(raised.value), raised.value.part


def test_blocks_of_ranks_on_nodes_and_of_nodes_in_racks() -> None:
    assert [PLACE.node_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (PLACE.ranks_on(1), PLACE.nodes_in(1), PLACE.racks) == ((2, 3), (2, 3), 2)
    uneven = Topology(ranks=5, nodes=2)
    assert [uneven.ranks_on(node) for node in range(2)] == [(0, 1, 2), (3, 4)]
    assert Topology(ranks=2, nodes=4).ranks_on(3) == ()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_every_rank_is_on_exactly_one_node(ranks: int, nodes: int, per_rack: int) -> None:
    place = Topology(ranks=ranks, nodes=nodes, nodes_per_rack=per_rack)
    assert sorted(r for node in range(nodes) for r in place.ranks_on(node)) == list(range(ranks))
    assert sorted(n for rack in range(place.racks) for n in place.nodes_in(rack)) == list(
        range(nodes)
    )


@pytest.mark.parametrize(
    ("select", "size", "count"),
    [
        ({"percent": 25}, 8, 2),
        ({"percent": 30}, 8, 3),
        ({"percent": 1}, 8, 1),
        ({"percent": 100}, 8, 8),
        ("minority", 8, 3),
        ("majority", 8, 5),
        ("minority", 5, 2),
        ("majority", 5, 3),
        ("minority", 3, 1),
        ("majority", 2, 2),
        ("one", 8, 1),
        ("all", 8, 8),
        ({"count": 3}, 8, 3),
    ],
)
def test_how_many(select: Any, size: int, count: int) -> None:
    assert len(hit({"select": select}, place=Topology(ranks=size)).ranks) == count


def test_two_have_no_minority() -> None:
    message, part = refusal({"select": "minority"}, place=Topology(ranks=2))
    assert (message, part) == ("2 workers have no minority; it takes 3", ("select",))


@given(st.integers(0, 10**6))
def test_the_excluded_and_the_protected_are_never_chosen(seed: int) -> None:
    target = {"select": "majority", "exclude": {"ranks": [0], "nodes": [3]}}
    assert hit(target, seed=seed).ranks == (1, 2, 3, 4, 5)
    some = hit({"select": {"count": 3}}, seed=seed, protected=frozenset({1, 2}))
    assert not {1, 2} & set(some.ranks) and len(some.ranks) == 3


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_an_exclusion_moves_only_the_excluded(seed: int, out: int) -> None:
    before = hit({"select": {"count": 3}}, seed=seed).ranks
    after = hit({"select": {"count": 3}, "exclude": {"ranks": [out]}}, seed=seed).ranks
    assert set(before) - {out} <= set(after)


def test_nobody_left() -> None:
    everybody = {"exclude": {"ranks": list(range(8))}}
    assert refusal(everybody) == (
        "every worker it could hit is excluded or protected",
        ("exclude",),
    )
    message, part = refusal({"select": {"count": 7}, "exclude": {"nodes": [0]}})
    assert (message, part) == (
        "cannot select 7 of 6 (2 excluded or protected)",
        ("select", "count"),
    )
    assert refusal({"rank": 0}, protected=frozenset({0}))[1] == ("exclude",)
    assert refusal({"role": "spare"})[0] == "there is no spare to select from"


def test_node_and_rack_narrow_the_candidates() -> None:
    assert hit({"node": 2, "select": "all"}).ranks == (4, 5)
    assert hit({"rack": 1, "select": "all"}).ranks == (4, 5, 6, 7)
    assert set(hit({"rack": 0}).ranks) < {0, 1, 2, 3}
    there = hit({"role": "any", "node": 3, "select": "all"}, spares=5)
    assert (there.ranks, there.spares) == ((6, 7), (0, 4))
    assert refusal({"node": 4}) == ("there is no node 4 among 4; set launcher.nodes", ("node",))
    assert refusal({"rack": 2})[1] == ("rack",)


@pytest.mark.parametrize("where", [Where.RANK, Where.LINK])
def test_what_acts_in_training_hits_no_spare_even_with_any_role(where: Where) -> None:
    chosen = hit({"role": "any", "select": "all"}, kind_of(where), spares=2)
    assert chosen.ranks == tuple(range(8)) and not chosen.spares
    assert hit({"role": "any", "select": "all"}, spares=2).spares == (0, 1)


def test_a_replica_is_all_the_ranks_that_hold_one_copy() -> None:
    two = Topology(ranks=8, nodes=4, shards=4)
    assert (two.replicas, two.ranks_of(1), two.whole({0, 4, 5, 6, 7})) == (2, (4, 5, 6, 7), 1)
    assert hit({"replica": 1}, place=two).ranks == (4, 5, 6, 7)
    some = hit({"replica": 1, "select": {"count": 2}, "exclude": {"ranks": [5]}}, place=two).ranks
    assert len(some) == 2 and set(some) < {4, 6, 7}
    assert hit({"replica": 1}, NODE, place=two).nodes == (2, 3)
    assert hit({"replica": 5}).ranks == (5,), "in data-parallel training a replica is one rank"
    assert refusal({"replica": 2}, place=two) == ("there is no replica 2 among 2", ("replica",))


def test_node_faults_choose_nodes() -> None:
    assert hit({"node": 2}, NODE) == Targets(nodes=(2,))
    assert hit({"rank": 5}, NODE) == Targets(nodes=(2,))
    assert len(hit({}, NODE).nodes) == 1
    assert hit({"rack": 1, "select": "all"}, NODE).nodes == (2, 3)
    assert hit({"select": "all", "exclude": {"nodes": [0], "ranks": [2]}}, NODE).nodes == (2, 3)
    assert hit({"select": "all"}, NODE, protected=frozenset({7})).nodes == (0, 1, 2)


def test_nothing_on_a_sheltered_node_is_chosen() -> None:
    out = frozenset({2})
    assert hit({"select": "all"}, NODE, sheltered=out).nodes == (0, 1, 3)
    assert hit({"select": "all"}, sheltered=out).ranks == (0, 1, 2, 3, 6, 7)
    assert hit({"role": "spare", "select": "all"}, spares=4, sheltered=out).spares == (0, 2, 3), (
        "spare 1 is on node 2"
    )
    assert hit({}, kind_of(Where.NODE, whole_racks=True), sheltered=out).nodes == (0, 1)
    assert refusal({"rank": 4}, sheltered=out)[1] == ("exclude",)


def test_correlated_faults_choose_racks() -> None:
    racks = kind_of(Where.NODE, whole_racks=True)
    assert {hit({}, racks, seed=seed).nodes for seed in range(40)} == {(0, 1), (2, 3)}
    assert hit({"node": 2}, racks).nodes == (2, 3)
    assert hit({}, racks, protected=frozenset({0})).nodes == (2, 3)


def test_links() -> None:
    four = Topology(ranks=4)
    assert hit({"link": {"src": 1, "dst": 2}}, LINK, place=four) == Targets(
        ranks=(1,), links=((1, 2),)
    )
    assert hit({"link": {"src": 1}}, LINK, place=four).links == ((1, 0), (1, 2), (1, 3))
    assert hit({"rank": 3}, LINK, place=four).links == ((3, 0), (3, 1), (3, 2))
    both = {"select": "all", "exclude": {"ranks": [2, 3]}}
    assert len(hit(both, LINK, place=four).links) == 6
    cut = kind_of(Where.LINK, separates=True)
    assert hit(both, cut, place=four).links == ((0, 2), (0, 3), (1, 2), (1, 3))
    assert refusal({"select": "all"}, cut, place=four)[0] == "a link needs a rank on its other side"
    assert refusal({"link": {"src": 1, "dst": 1}}, LINK)[1] == ("link", "dst")
    assert refusal({"link": {"src": 1, "dst": 9}}, LINK)[1] == ("link", "dst")


@pytest.mark.parametrize("where", [Where.CHECKPOINT, Where.STORAGE, Where.STORE, Where.COORDINATOR])
def test_what_a_job_has_one_of_needs_no_choice(where: Where) -> None:
    assert hit({}, kind_of(where)) == Targets()


@given(st.integers(0, 10**6), st.sampled_from(["minority", "majority", "one", {"percent": 40}]))
def test_the_choice_depends_on_seed_and_name_alone(seed: int, select: Any) -> None:
    assert hit({"select": select}, seed=seed) == hit({"select": select}, seed=seed)
    ours = {hit({"select": select}, seed=seed, name=f"f{n}").ranks for n in range(20)}
    assert len(ours) > 1


@given(
    words=st.lists(st.integers() | st.text(), min_size=1),
    lasts=st.lists(st.tuples(st.text(), st.integers()), min_size=1),
)
def test_what_is_drawn_at_once_is_what_is_drawn_one_by_one(
    words: list[int | str], lasts: list[tuple[str, int]]
) -> None:
    """Or stored runs would face other faults when they are planned again."""
    assert list(draws(words, lasts)) == [draw(*words, *last) for last in lasts]
