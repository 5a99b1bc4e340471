"""What torch asks of a group that gets other members while its processes live, of each kind of
group that can: ours on gloo, and torch's own (from torch 2.14 on) on gloo and NCCL.

Each test has three processes. Everyone gives 1, 10 or 100 to each sum, by its number, so that the
sum says who was there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Self, ranks, results
from tests.support.running import LIMIT_S
from trainchaos.recovery.collectives.group import GenerationLost, Group
from trainchaos.recovery.process.local import LOOPBACK
from trainchaos.recovery.transport.reverse_dns import nameless

WORLD = 3
EVERYONE = range(WORLD)
LIMIT = timedelta(seconds=LIMIT_S)
SHORT_S = 0.5
"""A collective's timeout where one is missing; nothing else happens under it."""
c10d: Any = dist

Seen = tuple[int, int, int]
"""(rank, size, sum): what a member sees of its group."""


class Kind(ABC):
    """Groups of one kind, in one process. ``reused``: what the second use of a number raises; empty
    where it is never asked.
    """

    reused: ClassVar[str] = ""

    def __init__(self, me: Self, timeout: timedelta = LIMIT) -> None:
        self.me, self.timeout = me, timeout
        self.store = nameless(
            partial(dist.TCPStore, LOOPBACK, me.port, is_master=False, timeout=LIMIT)
        )

    @staticmethod
    @abstractmethod
    def missing() -> str:
        """Why there are none here; empty: there are."""

    @abstractmethod
    def join(self, number: int, members: Sequence[int]) -> None:
        """Be in the group of these processes, in this order, and in no other."""

    @abstractmethod
    def sum(self) -> Seen:
        """An all-reduce. Raises RuntimeError or GenerationLost when it fails."""

    @abstractmethod
    def abort(self) -> None:
        """Break off whatever the group does."""

    @abstractmethod
    def set_timeout(self, timeout: timedelta) -> None:
        """Of the collectives of groups that are joined from now on."""

    def meet(self, number: int, members: Sequence[int] = EVERYONE) -> Seen:
        """``join`` and ``sum``, until all have their sum: who leaves before breaks it for the
        others (in a job the supervisor sees to it).
        """
        self.join(number, members)
        sum_seen = self.sum()
        self.store.set(f"met/{number}/{self.me.rank}", "")
        self.await_met(number, members)
        return sum_seen

    def await_met(self, number: int, members: Sequence[int]) -> None:
        """Wait until these have their sum."""
        self.store.wait([f"met/{number}/{rank}" for rank in members])


class Ours(Kind):
    """``recovery.collectives.group``: a generation each."""

    group: Group | None = None

    @staticmethod
    def missing() -> str:
        """Gloo is in every torch."""
        return ""

    def join(self, number: int, members: Sequence[int]) -> None:
        """See Kind."""
        if self.group is not None:
            self.group.leave()
        self.group = Group(
            generation=number,
            rank=list(members).index(self.me.rank),
            world=len(members),
            store_port=self.me.port,
            backend="gloo",
            timeout_s=LIMIT_S,
            collective_timeout_s=self.timeout.total_seconds(),
            check=lambda: None,
        )
        self.group.form()

    def sum(self) -> Seen:
        """See Kind."""
        assert self.group is not None
        given = torch.full((4,), 10.0**self.me.rank)
        self.group.wait(self.group.start_all_reduce(given))
        return self.group.rank, self.group.world, int(given[0])

    def abort(self) -> None:
        """See Kind."""
        assert self.group is not None
        self.group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """See Kind."""
        self.timeout = timeout


class Reconfigured(Kind):
    """torch's, made with ``enable_reconfigure``: one object for all groups."""

    backend: ClassVar[str] = "gloo"
    device: ClassVar[str] = "cpu"
    reused: ClassVar[str] = "already used"

    def __init__(self, me: Self, timeout: timedelta = LIMIT) -> None:
        super().__init__(me, timeout)
        self.at = torch.device(self.device, me.rank) if self.device == "cuda" else self.device
        if self.device == "cuda":
            torch.cuda.set_device(self.at)
        c10d.init_process_group(
            self.backend,
            store=dist.PrefixStore("group", self.store),
            rank=me.rank,
            world_size=me.world,
            timeout=timeout,
            enable_reconfigure=True,
        )

    @staticmethod
    def missing() -> str:
        """It came with torch 2.14."""
        return "" if hasattr(dist, "_reconfigure") else f"torch {torch.__version__} has none"

    def join(self, number: int, members: Sequence[int]) -> None:
        """See Kind."""
        self.store.set(f"{number}/{self.me.rank}", c10d._get_reconfigure_handle())
        handles = [self.store.get(f"{number}/{one}").decode() for one in members]
        c10d._reconfigure(number, handles, timeout=LIMIT).wait()

    def sum(self) -> Seen:
        """See Kind."""
        given = torch.full((4,), 10.0**self.me.rank, device=self.at)
        dist.all_reduce(given)
        return dist.get_rank(), dist.get_world_size(), int(given[0])

    def abort(self) -> None:
        """See Kind."""
        self._backend().abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """See Kind."""
        self._backend()._set_default_timeout(timeout)

    def _backend(self) -> Any:
        return c10d.get_backend_impl(dist.group.WORLD, torch.device(self.at))


class ReconfiguredNccl(Reconfigured):
    """The same on ``nccl2``."""

    backend: ClassVar[str] = "nccl2"
    device: ClassVar[str] = "cuda"

    @staticmethod
    def missing() -> str:
        """It wants a GPU for each process."""
        here = torch.cuda.device_count()
        return Reconfigured.missing() or (here < WORLD and f"{here} of {WORLD} GPUs") or ""


KINDS = [Ours, Reconfigured, ReconfiguredNccl]
pytestmark = pytest.mark.real


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[Kind]:
    found: type[Kind] = request.param
    if why := found.missing():
        pytest.skip(why)
    return found


def seen(kind: type[Kind], task: Callable[[type[Kind], Self], Any]) -> list[Any]:
    """What three processes return."""
    return results(partial(task, kind), WORLD)


def shrink(kind: type[Kind], me: Self, *, without: int) -> tuple[Seen, Seen | None]:
    """All, then all but one, which waits until the others are done."""
    group = kind(me)
    first = group.meet(1)
    others = [one for one in EVERYONE if one != without]
    if me.rank == without:
        me.hear()
        return first, None
    again = group.meet(2, others)
    me.say("done")
    return first, again


def shrunk(kind: type[Kind], without: int) -> list[Seen | None]:
    """What each sees after ``shrink``."""
    with ranks(partial(shrink, kind, without=without), WORLD) as started:
        for number, rank in enumerate(started):
            if number != without:
                rank.said()
        started[without].tell("done")
        found = [rank.result() for rank in started]
    assert [first for first, _ in found] == [(0, 3, 111), (1, 3, 111), (2, 3, 111)]
    return [again for _, again in found]


def test_shrink_by_the_last(kind: type[Kind]) -> None:
    assert shrunk(kind, 2) == [(0, 2, 11), (1, 2, 11), None]


def test_shrink_by_a_middle_one(kind: type[Kind]) -> None:
    assert shrunk(kind, 1) == [(0, 2, 101), None, (1, 2, 101)]


def down_and_up(kind: type[Kind], me: Self) -> list[Seen]:
    """Each alone, all, each alone, all."""
    group = kind(me)
    found = [group.meet(10 + me.rank, [me.rank]), group.meet(20)]
    return [*found, group.meet(30 + me.rank, [me.rank]), group.meet(40)]


def test_scale_down_and_up(kind: type[Kind]) -> None:
    found = seen(kind, down_and_up)
    assert found == [
        [alone := (0, 1, 10**one), (one, 3, 111), alone, (one, 3, 111)] for one in EVERYONE
    ]


def late(kind: type[Kind], me: Self) -> list[Seen]:
    """Two begin, the third comes later."""
    group = kind(me)
    found = [group.meet(1, [0, 1])] if me.rank < 2 else []
    return [*found, group.meet(2)]


def test_late_join(kind: type[Kind]) -> None:
    assert seen(kind, late) == [
        [(0, 2, 11), (0, 3, 111)],
        [(1, 2, 11), (1, 3, 111)],
        [(2, 3, 111)],
    ]


def merge(kind: type[Kind], me: Self) -> list[Seen]:
    """One alone and two together, then all, then two together and one alone. A later group forgets
    the keys of earlier ones, so that it begins when these have met.
    """
    group = kind(me)
    if me.rank == 0:
        seen_by_me = [group.meet(1, [0])]
    else:
        group.await_met(1, [0])
        seen_by_me = [group.meet(2, [1, 2])]
    group.await_met(2, [1, 2])
    seen_by_me.append(group.meet(3))
    if me.rank < 2:
        return [*seen_by_me, group.meet(4, [0, 1])]
    group.await_met(4, [0, 1])
    return [*seen_by_me, group.meet(5, [2])]


def test_merge_and_split(kind: type[Kind]) -> None:
    assert seen(kind, merge) == [
        [(0, 1, 1), (0, 3, 111), (0, 2, 11)],
        [(0, 2, 110), (1, 3, 111), (1, 2, 11)],
        [(1, 2, 110), (2, 3, 111), (0, 1, 100)],
    ]


def same(kind: type[Kind], me: Self) -> list[Seen]:
    """The same members twice, then in the other order."""
    group = kind(me)
    return [group.meet(1), group.meet(2), group.meet(3, [2, 1, 0])]


def test_the_same_members_again_and_in_another_order(kind: type[Kind]) -> None:
    assert seen(kind, same) == [[(one, 3, 111)] * 2 + [(2 - one, 3, 111)] for one in EVERYONE]


def aborted(kind: type[Kind], me: Self) -> Seen:
    """Another group after the first was aborted."""
    group = kind(me)
    group.meet(1)
    group.abort()
    return group.meet(2)


def test_after_an_abort(kind: type[Kind]) -> None:
    assert seen(kind, aborted) == [(one, 3, 111) for one in EVERYONE]


def timed_out(kind: type[Kind], me: Self) -> Seen:
    """The last takes no part in a sum, and the others give up; all meet again."""
    group = kind(me, timedelta(seconds=SHORT_S))
    group.join(1, EVERYONE)
    if me.rank == WORLD - 1:
        me.hear()
    else:
        with pytest.raises((RuntimeError, GenerationLost)):
            group.sum()
        me.say("timed out")
        me.hear()
    group.set_timeout(LIMIT)
    return group.meet(2)


def test_after_a_timeout(kind: type[Kind]) -> None:
    with ranks(partial(timed_out, kind), WORLD) as started:
        for rank in started[:-1]:
            assert rank.said() == "timed out"
        for rank in started:
            rank.tell("go on")
        assert [rank.result() for rank in started] == [(one, 3, 111) for one in EVERYONE]


def again(kind: type[Kind], me: Self) -> str:
    """What a number that was used says."""
    group = kind(me)
    group.meet(1 + me.rank, [me.rank])
    with pytest.raises(RuntimeError) as caught:
        group.meet(1 + me.rank, [me.rank])
    return str(caught.value)


def test_a_number_is_used_once(kind: type[Kind]) -> None:
    if not kind.reused:
        pytest.skip("the supervisor numbers generations upwards: none comes twice")
    assert all(kind.reused in words for words in seen(kind, again))
