"""A group gets other members while its processes live: fewer, more, others, and in another order.

Everyone gives 1, 10 or 100 to each sum, by its number, so that the sum says who was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Self, ranks, results
from tests.support.running import LIMIT_S
from trainchaos.recovery.collectives.group import GenerationLost, Group
from trainchaos.recovery.process.local import LOOPBACK
from trainchaos.recovery.transport.reverse_dns import nameless

pytestmark = pytest.mark.real
WORLD = 3
ALL = (0, 1, 2)
SHORT_S = 0.5
"""A collective's timeout where one is missing; nothing else happens under it."""
PLANS: dict[str, list[tuple[int, ...]]] = {
    "without the last": [ALL, (0, 1)],
    "without a middle one": [ALL, (0, 2)],
    "down and up": [(0,), (1,), (2,), ALL, (0,), (1,), (2,), ALL],
    "one comes late": [(0, 1), ALL],
    "merge and split": [(0,), (1, 2), ALL, (0, 1), (2,)],
    "the same again, and in another order": [ALL, ALL, (2, 1, 0)],
}


class Member:
    """One process."""

    def __init__(self, me: Self) -> None:
        self.me = me
        self.group: Group | None = None
        self.store = nameless(partial(dist.TCPStore, LOOPBACK, me.port, is_master=False))

    def join(self, number: int, members: Sequence[int], timeout_s: float = LIMIT_S) -> None:
        """Be in the group of these processes, in this order, and in no other."""
        if self.group is not None:
            self.group.leave()
        self.group = Group(
            generation=number,
            rank=list(members).index(self.me.rank),
            world=len(members),
            store_port=self.me.port,
            backend="gloo",
            timeout_s=LIMIT_S,
            collective_timeout_s=timeout_s,
            check=lambda: None,
        )
        self.group.form()

    def sum(self) -> tuple[int, int, int]:
        """(rank, size, sum). Raises GenerationLost."""
        assert self.group is not None
        given = torch.full((4,), 10.0**self.me.rank)
        self.group.wait(self.group.start_all_reduce(given))
        return self.group.rank, self.group.world, int(given[0])

    def meet(self, number: int, members: Sequence[int]) -> tuple[int, int, int]:
        """``join`` and ``sum``, until all have their sum: who leaves before breaks it for the
        others (in a job the supervisor sees to it).
        """
        self.join(number, members)
        seen = self.sum()
        self.store.set(f"met/{number}/{self.me.rank}", "")
        self.await_met(number, members)
        return seen

    def await_met(self, number: int, members: Sequence[int]) -> None:
        """A later group forgets the keys of earlier ones, so that it begins when these have met."""
        self.store.wait([f"met/{number}/{rank}" for rank in members])


def follow(plan: list[tuple[int, ...]], aborts: bool, me: Self) -> list[tuple[int, int, int]]:
    """One group of the plan after the other. ``aborts``: each is broken off by who was in it."""
    member, seen = Member(me), []
    for number, members in enumerate(plan, start=1):
        if me.rank not in members:
            member.await_met(number, members)
            continue
        seen.append(member.meet(number, members))
        if aborts and member.group is not None:
            member.group.abort()
    return seen


@pytest.mark.parametrize("aborts", [False, True], ids=["left", "aborted"])
@pytest.mark.parametrize("name", PLANS)
def test_each_group_has_its_members_and_nobody_else(name: str, aborts: bool) -> None:
    plan = PLANS[name]
    assert results(partial(follow, plan, aborts), WORLD) == [
        [
            (members.index(one), len(members), sum(10**other for other in members))
            for members in plan
            if one in members
        ]
        for one in ALL
    ]


def timed_out(me: Self) -> tuple[int, int, int]:
    """The last takes no part in a sum, and the others give up; all meet again."""
    member = Member(me)
    member.join(1, ALL, SHORT_S)
    if me.rank < WORLD - 1:
        with pytest.raises(GenerationLost):
            member.sum()
        me.say("timed out")
    me.hear()
    return member.meet(2, ALL)


def test_after_a_timeout() -> None:
    with ranks(timed_out, WORLD) as started:
        for rank in started[:-1]:
            assert rank.said() == "timed out"
        for rank in started:
            rank.tell("go on")
        assert [rank.result() for rank in started] == [(one, 3, 111) for one in ALL]
