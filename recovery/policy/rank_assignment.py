"""Assigns processes to the ranks of the next generation, and finds the step it can continue from.
Pure.

A replica is any set of processes that hold one shard each: a process keeps its shard for life, but
the replica it completes may change. Data-parallel training is the case of one shard.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.strategy import ClusterView, ProcessView


class StateHolder(Protocol):
    """What matters about a process as far as its state goes; see ``ProcessView``."""

    @property
    def valid(self) -> bool:
        """Whether its state is whole."""

    @property
    def step(self) -> int:
        """The last step it applied."""

    @property
    def pending(self) -> int:
        """The step it has reduced and not applied."""

    @property
    def shard(self) -> int | None:
        """Its part of the model."""


def can_supply(process: StateHolder, step: int) -> bool:
    """Whether it can bring its part of ``step``: applied, or reduced and ready to apply."""
    return process.valid and (
        process.step == step or (process.step == step - 1 and process.pending == step)
    )


def common_step(people: Iterable[StateHolder], shards: int) -> int | None:
    """The newest step that every shard can be brought to; None when some shard is lost.

    At least one process must have applied it: only that one knows the totals that the others need
    to apply it too. A state cannot go back a step, so a process that is further copies as well.
    """
    whole = [process for process in people if process.valid]
    for step in sorted({process.step for process in whole}, reverse=True):
        if {process.shard for process in whole if can_supply(process, step)} >= set(range(shards)):
            return step
    return None


def seat(
    view: ClusterView, people: Sequence[ProcessView], fresh: Sequence[str], *, replicas: int
) -> tuple[str, ...]:
    """Which process takes which rank when up to ``replicas`` replicas are filled; () when not one
    can be.

    ``people``: processes with a shard, preferred ones first; ``fresh``: processes that hold no
    shard yet, and take any. While no replica is given up, members keep their ranks and others fill
    the gaps; else replicas move up.
    """
    columns = by_shard(people, view.shards)
    number = _fillable(columns, len(fresh), replicas)
    step = common_step(people, view.shards)
    there = {p.name for p in view.survivors}
    lost = Counter(
        rank // view.shards for rank, name in enumerate(view.members) if name not in there
    )
    stays = number * view.shards >= len(view.members)
    reserve = iter(fresh)
    seats: list[str] = [""] * (number * view.shards)
    for shard, column in enumerate(columns):
        moving = []
        for process in _choose(view, column, number, step, lost):
            if stays and process.rank is not None:
                seats[process.rank] = process.name
            else:
                moving.append(process.name)
        names = itertools.chain(moving, reserve)
        for rank in range(shard, len(seats), view.shards):
            seats[rank] = seats[rank] or next(names)
    return tuple(seats)


def missing_shards(view: ClusterView, people: Iterable[ProcessView]) -> list[int]:
    """Shards that none of these processes holds whole."""
    held = {process.shard for process in people if process.valid}
    return [shard for shard in range(view.shards) if shard not in held]


def least_followed(followed: Iterable[int], shards: int) -> int:
    """The shard that one more live spare is to follow: the first of those that fewest do.
    ``followed``: the shard of each spare that follows one.
    """
    spares = Counter(followed)
    return min(range(shards), key=lambda shard: spares[shard])


def by_shard(people: Iterable[ProcessView], shards: int) -> list[list[ProcessView]]:
    """The holders of each shard."""
    columns: list[list[ProcessView]] = [[] for _ in range(shards)]
    for process in people:
        if process.shard is not None:
            columns[process.shard].append(process)
    return columns


def _fillable(columns: Sequence[Sequence[ProcessView]], fresh: int, most: int) -> int:
    """How many replicas can be made of these holders and ``fresh`` processes, up to ``most``. Each
    further replica takes one more fresh process for every shard that has run out of holders.
    """
    sizes = Counter(len(column) for column in columns)
    short = 0
    for number in range(1, most + 1):
        short += sizes[number - 1]
        fresh -= short
        if fresh < 0:
            return number - 1
    return most


def _choose(
    view: ClusterView,
    column: Sequence[ProcessView],
    number: int,
    step: int | None,
    lost: Mapping[int, int],
) -> list[ProcessView]:
    """Of more holders of one shard than there are places: those that hold the step, from replicas
    that lost least; of those that wait, those whose place is not about to fail, and of these those
    that follow it. ``lost``: missing members of each replica.
    """
    if len(column) <= number:
        return list(column)

    def rating(process: ProcessView) -> tuple[bool, bool, int, bool, bool]:
        behind = step is not None and not can_supply(process, step)
        broken = view.world if process.rank is None else lost.get(process.rank // view.shards, 0)
        in_danger = process.rank is None and process.warned
        return behind, process.step != step, broken, in_danger, not process.live

    best = {process.name for process in sorted(column, key=rating)[:number]}
    return [process for process in column if process.name in best]


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """``copies``: receiving rank -> the rank that sends it its part; ``finish``: the step that some
    have to finish first (0: none); ``holders``: by shard, the ranks that have it; ``direct``: the
    shards of which copies go from rank to rank, and not to all.
    """

    layout: Layout
    copies: Mapping[int, int] = field(default_factory=dict)
    finish: int = 0
    holders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    direct: frozenset[int] = frozenset()

    def spread(self) -> CopyPlan:
        """The same with several senders, for each shard where that moves less than a broadcast."""
        copies, direct = dict(self.copies), set(self.direct)
        lack: dict[int, list[int]] = {}
        for rank in self.copies:
            lack.setdefault(self.layout.shard_of(rank), []).append(rank)
        for shard, lacking in lack.items():
            holders = self.holders[shard]
            if each_sends(lacking, holders) <= broadcast_sends(lacking, holders):
                direct.add(shard)
                for place, rank in enumerate(lacking):
                    copies[rank] = holders[place % len(holders)]
        return replace(self, copies=copies, direct=frozenset(direct))

    def orders(self) -> list[dict[str, Any]]:
        """What each rank is told, as fields of ``recovery.transport.wire.StateSource``."""
        common = {self.layout.shard_of(giver): giver for giver in self.copies.values()}
        feeds: dict[int, list[int]] = {}
        for rank, giver in self.copies.items():
            feeds.setdefault(giver, []).append(rank)
        return [self._order(rank, common, feeds) for rank in range(self.layout.world)]

    def _order(
        self, rank: int, common: Mapping[int, int], feeds: Mapping[int, list[int]]
    ) -> dict[str, Any]:
        shard, receives = self.layout.shard_of(rank), rank in self.copies
        if shard not in self.direct:
            return {"source": common.get(shard, -1), "receives": receives}
        source = self.copies.get(rank, rank if rank in feeds else -1)
        fed = feeds.get(rank, [])
        return {"source": source, "receives": receives, "direct": True, "feeds": fed}


def each_sends(lacking: Sequence[int], holders: Sequence[int]) -> int:
    """How often a holder sends its state at the most, from rank to rank."""
    return math.ceil(len(lacking) / len(holders))


def broadcast_sends(lacking: Sequence[int], holders: Sequence[int]) -> int:
    """How often the first holder sends its state in a broadcast."""
    return math.ceil(math.log2(len(lacking) + len(holders)))
