"""Who sends its state to whom: to who lacks it alone, from several holders, or to all at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recovery.supervise.test_controller import Rig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.rank_assignment import CopyPlan, broadcast_sends, each_sends
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.transport.wire import Ready, StateSource


def plan(world: int, lacking: set[int], shards: int = 1) -> CopyPlan:
    """Of a world in which these ranks lack the state."""
    layout = Layout(world=world, shards=shards)
    holders = {
        shard: [rank for rank in layout.holders(shard) if rank not in lacking]
        for shard in range(shards)
    }
    copies = {rank: holders[layout.shard_of(rank)][0] for rank in sorted(lacking)}
    return CopyPlan(layout=layout, copies=copies, holders=holders)


ALONE = {"source": -1, "receives": False, "direct": True, "feeds": []}


def test_one_that_lacks_the_state_gets_it_of_one_holder_and_the_others_take_no_part() -> None:
    orders = plan(4, {2}).spread().orders()
    assert orders[2] == {"source": 0, "receives": True, "direct": True, "feeds": []}
    assert orders[0] == {"source": 0, "receives": False, "direct": True, "feeds": [2]}
    for rank in (1, 3):
        assert orders[rank] == ALONE


def test_several_get_it_of_different_holders_at_once() -> None:
    spread = plan(6, {1, 4, 5}).spread()
    assert dict(spread.copies) == {1: 0, 4: 2, 5: 3}
    assert [order["feeds"] for order in spread.orders()] == [[1], [], [4], [5], [], []]


def test_a_broadcast_stays_where_the_holders_would_send_more_often() -> None:
    """A checkpoint that rank 0 has read goes to all."""
    given = plan(8, set(range(1, 8)))
    spread = given.spread()
    assert not spread.direct and spread == given
    assert spread.orders() == [{"source": 0, "receives": rank > 0} for rank in range(8)]


def test_each_shard_is_decided_by_itself() -> None:
    """Of four replicas of two shards, one lacks shard 0, and three lack shard 1."""
    spread = plan(8, {2, 3, 5, 7}, shards=2).spread()
    assert spread.direct == {0} and dict(spread.copies) == {2: 0, 3: 1, 5: 1, 7: 1}
    orders = spread.orders()
    assert orders[1] == {"source": 1, "receives": False}
    assert orders[4] == ALONE


@pytest.mark.parametrize("world", range(2, 12))
def test_every_receiver_is_fed_by_one_holder_that_knows_it(world: int) -> None:
    for lost in range(1, world):
        spread = plan(world, set(range(world - lost, world))).spread()
        orders = [StateSource(**order) for order in spread.orders()]
        for rank, order in enumerate(orders):
            if order.direct:
                fed = [to for to, giver in spread.copies.items() if giver == rank]
                assert order.feeds == fed and not (fed and order.receives)
        if spread.direct:
            lacking, holders = range(lost), range(world - lost)
            assert max(len(order.feeds) for order in orders) == each_sends(lacking, holders)
            assert each_sends(lacking, holders) <= broadcast_sends(lacking, holders)


def test_nobody_lacks_anything() -> None:
    spread = plan(3, set()).spread()
    assert not spread.direct and spread.orders() == [
        {"source": -1, "receives": False} for rank in range(3)
    ]


def test_a_plan_for_many_ranks_is_made_in_one_pass() -> None:
    """As the restart of 16,384 ranks of 2,048 shards from a checkpoint: who lacks what is not
    looked for anew for each shard.
    """
    shards, world = 2048, 16_384
    layout, looked = Layout(world=world, shards=shards), 0

    class Counted(dict[int, int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looked
            for rank in super().__iter__():
                looked += 1
                yield rank

    copies = Counted({rank: rank % shards for rank in range(shards, world)})
    holders = {shard: (shard,) for shard in range(shards)}
    CopyPlan(layout=layout, copies=copies, holders=holders).spread()
    assert looked <= 2 * world


@pytest.mark.parametrize(
    ("backends", "direct"),
    [(("gloo",) * 5, True), (("nccl",) * 5, False), (("gloo", "gloo", "", "gloo", "gloo"), False)],
)
def test_ranks_copy_from_rank_to_rank_where_all_are_known_to_reach_one_another(
    backends: tuple[str, ...], direct: bool
) -> None:
    """Not over NCCL, and not where a process has not said what it exchanges over: a supervisor has
    adopted it.
    """
    rig = Rig(HotSpare())
    for name, backend in zip(rig.names(), backends, strict=True):
        said = {"backend": backend} if backend else {}
        rig.control.on_message(name, Ready(versions=said))
    rig.join(*rig.members, step=0)
    rig.go_on(10, first=1)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=10)
    orders = rig.joins()
    taken = [name for name, order in orders.items() if order.state.source >= 0]
    assert orders["s4"].state.receives and orders["s4"].state.direct is direct
    assert taken == (["w0", "s4"] if direct else list(orders)), "who takes part"
    assert orders["w0"].state.feeds == ([1] if direct else [])
