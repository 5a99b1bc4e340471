"""Who can sit where in the next generation, and which step it can go on from. Pure.

A replica is any set of processes that hold one shard each: a process keeps its shard for life, but whose replica it
completes may change. Data-parallel training is the case of one shard.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from recovery.strategy import ClusterView, ProcessView


def brings(process: ProcessView, step: int) -> bool:
    """Whether it holds its part of ``step``: applied, or reduced and only to be applied."""
    return process.valid and (process.step == step or (process.step == step - 1 and process.pending == step))


def common_step(people: Iterable[ProcessView], shards: int) -> int | None:
    """The newest step that every shard can be brought to; None when some shard is lost.

    Somebody has applied it: only they know what the others need to apply it too. Nobody can go back a step, so
    whoever is further copies as well.
    """
    whole = [process for process in people if process.valid]
    for step in sorted({process.step for process in whole}, reverse=True):
        if {process.shard for process in whole if brings(process, step)} >= set(range(shards)):
            return step
    return None


def seat(
    view: ClusterView, people: Sequence[ProcessView], fresh: Sequence[str], *, replicas: int
) -> tuple[str, ...]:
    """Who takes which rank when up to ``replicas`` replicas are filled; () when not one can be.

    ``people``: processes with a shard, those to prefer first; ``fresh``: processes that hold none yet, and take any.
    While no replica is given up, members keep their ranks and others fill the gaps; else replicas move up.
    """
    columns = [[p for p in people if p.shard == shard] for shard in range(view.shards)]
    number = replicas
    while number and sum(max(0, number - len(column)) for column in columns) > len(fresh):
        number -= 1
    step = common_step(people, view.shards)
    stays = number * view.shards >= len(view.members)
    reserve = iter(fresh)
    seats: list[str] = [""] * (number * view.shards)
    for shard, column in enumerate(columns):
        moving = []
        for process in _choose(view, column, number, step):
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


def _choose(
    view: ClusterView, column: Sequence[ProcessView], number: int, step: int | None
) -> list[ProcessView]:
    """Of more holders of one shard than there is room for: those that hold the step, of replicas that lost least."""
    if len(column) <= number:
        return list(column)
    there = {p.name for p in view.survivors}
    lost = Counter(rank // view.shards for rank, name in enumerate(view.members) if name not in there)

    def rating(process: ProcessView) -> tuple[bool, bool, int]:
        behind = step is not None and not brings(process, step)
        broken = view.world if process.rank is None else lost[process.rank // view.shards]
        return behind, process.step != step, broken

    best = {process.name for process in sorted(column, key=rating)[:number]}
    return [process for process in column if process.name in best]
