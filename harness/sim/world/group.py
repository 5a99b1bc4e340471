"""A simulated process group of one generation: rendezvous, collectives, and how they break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainchaos.harness.sim.world.links import SimLinks
from trainchaos.harness.sim.world.process import Process
from trainchaos.harness.sim.world.settings import MS
from trainchaos.recovery.policy.layout import Layout

NOTICE = 0.6  # share of the peers that are a lost member's neighbours and see the connection close
NOTICE_MS = (0.1, 4.0)
ABORT_MS = 2.0
BLOCKED_LOOK_MS = 5


class SimGenerationLost(Exception):
    """This generation cannot continue: a peer is gone, a link broke, or the supervisor
    aborted it.
    """


@dataclass(kw_only=True)
class _Waiter:
    """``among``: the ranks it waits for, including itself; empty: all."""

    process: Process
    ticket: int
    among: frozenset[int] = frozenset()

    def needs(self, rank: int) -> bool:
        """Whether it waits for that member."""
        return not self.among or rank in self.among


class Group:
    """The group of one generation. Every call is made by a member's body, which then yields None to
    wait.
    """

    def __init__(
        self,
        *,
        generation: int,
        size: int,
        form_ns: float,
        spread_ns: float,
        links: SimLinks | None = None,
    ) -> None:
        self._spread_ns = spread_ns
        self.generation = generation
        self._links = links
        self._size = size
        self._form_ns = form_ns
        self._members: dict[int, Process] = {}
        self._gone: set[int] = set()
        self._waiting: dict[int, _Waiter] = {}
        self._parts: dict[frozenset[int], dict[int, Any]] = {}
        self._left: dict[int, Any] = {}
        self._formed = self._storeless = False

    def form(self, rank: int, process: Process, *, standby: bool = False) -> None:
        """Wait for all members. ``standby``: they are connected already."""
        self._members[rank] = process
        self._wait(rank)
        if self._storeless and not standby:
            self._cannot_form(rank)
        if len(self._members) == self._size:
            rings = (range(self._size),)
            takes_ns = 0.0 if standby else self._form_ns
            self._finish_when_open(dict(self._waiting), takes_ns, None, 0, rings)

    def meet(
        self,
        rank: int,
        part: Any,
        combine: Callable[[dict[int, Any]], Any],
        takes_ns: float,
        size: int = 0,
        *,
        among: Iterable[int] = (),
        rings: Sequence[Sequence[int]] = (),
    ) -> None:
        """One collective: wait for ``combine(parts by rank)``, ``takes_ns`` after all members have
        arrived.

        ``size``: bytes over each link; ``among``: the ranks that take part, if not all; ``rings``:
        the groups of ranks that exchange data, if not all ranks in one ring.

        Members get the result at slightly different times, and the group may break in between: then
        some have it, and others never get it.
        """
        self._formed = True  # a member that is here has formed the group
        ranks = frozenset(among)
        parts = self._parts.setdefault(ranks, {})
        parts[rank] = part
        self._wait(rank, ranks)
        if len(parts) == (len(ranks) or self._size):
            del self._parts[ranks]
            result = combine({member: parts[member] for member in sorted(parts)})
            waiters = {member: self._waiting[member] for member in parts if member in self._waiting}
            rings = rings or (sorted(ranks) or range(self._size),)
            self._finish_when_open(waiters, takes_ns, result, size, rings)

    def leave_part(self, rank: int, part: Any) -> None:
        """Leave something for another member to take, without waiting."""
        self._left[rank] = part

    def take_parts(self, ranks: Iterable[int]) -> dict[int, Any] | None:
        """The parts that these ranks have left, by rank; None until all have."""
        wanted = sorted(ranks)
        if any(rank not in self._left for rank in wanted):
            return None
        return {rank: self._left.pop(rank) for rank in wanted}

    def lose_store(self) -> None:
        """The store is gone: a group that is still forming never will."""
        if self._formed:
            return
        self._storeless = True
        for rank in sorted(self._waiting):
            self._cannot_form(rank)

    def _cannot_form(self, rank: int) -> None:
        waiter = self._waiting[rank]
        delay = waiter.process.rng.uniform(*NOTICE_MS) * MS
        waiter.process.clock.after(
            delay, partial(self._break, rank, waiter, "could not form the group")
        )

    def abort(self, rank: int) -> None:
        """Break this member's wait, from its agent."""
        waiter = self._waiting.get(rank)
        if waiter is not None:
            delay = waiter.process.rng.uniform(0, ABORT_MS) * MS
            waiter.process.clock.after(
                delay, partial(self._break, rank, waiter, "aborted by the supervisor")
            )

    def leave(self, rank: int) -> None:
        """This member closes its connections, willingly or by dying; members that wait for it may
        notice.
        """
        if rank in self._gone:
            return
        self._gone.add(rank)
        self._waiting.pop(rank, None)
        for other in sorted(self._waiting):
            if self._waiting[other].needs(rank):
                self._maybe_notice(other)

    def _wait(self, rank: int, among: frozenset[int] = frozenset()) -> None:
        process = self._members[rank]
        waiter = self._waiting[rank] = _Waiter(process=process, ticket=process.ticket, among=among)
        if any(waiter.needs(gone) for gone in self._gone):
            self._maybe_notice(rank)

    def _maybe_notice(self, rank: int) -> None:
        """A neighbour of the lost member sees the connection close; other members learn of it
        elsewhere.
        """
        waiter = self._waiting[rank]
        rng = waiter.process.rng
        if rng.random() < NOTICE:
            delay = rng.uniform(*NOTICE_MS) * MS
            waiter.process.clock.after(
                delay, partial(self._break, rank, waiter, "connection closed by peer")
            )

    def _finish_when_open(
        self,
        waiters: dict[int, _Waiter],
        takes_ns: float,
        value: Any,
        size: int,
        rings: Sequence[Sequence[int]],
    ) -> None:
        """Complete the waits, once no link in a ring is blocked."""
        names = [[self._members[rank].name for rank in ring] for ring in rings]
        waiting = [rank for rank in sorted(waiters) if self._waiting.get(rank) is waiters[rank]]
        if self._links is not None and waiting:
            if any(self._links.blocked(ring) for ring in names):
                again = partial(self._finish_when_open, waiters, takes_ns, value, size, rings)
                waiters[waiting[0]].process.clock.after(BLOCKED_LOOK_MS * MS, again)
                return
            takes_ns += max(self._links.extra_ns(ring, size) for ring in names)
        for rank in waiting:
            self._finish(rank, takes_ns, value)

    def _finish(self, rank: int, delay_ns: float, value: Any) -> None:
        waiter = self._waiting[rank]
        delay_ns += waiter.process.rng.uniform(0, self._spread_ns)
        waiter.process.clock.after(delay_ns, partial(self._complete, rank, waiter, value))

    def _complete(self, rank: int, waiter: _Waiter, value: Any) -> None:
        if self._waiting.get(rank) is waiter:
            del self._waiting[rank]
            waiter.process.wake(waiter.ticket, value)

    def _break(self, rank: int, waiter: _Waiter, why: str) -> None:
        if self._waiting.get(rank) is waiter:
            del self._waiting[rank]
            waiter.process.fail(waiter.ticket, SimGenerationLost(why))


def rings_of(layout: Layout) -> tuple[range, ...]:
    """The rings that exchange gradients: the holders of each shard, and each replica, if they have
    more than one rank (``recovery.collectives.group``).
    """
    holders = [layout.holders(shard) for shard in range(layout.shards)]
    replicas = [layout.replica(number) for number in range(layout.replicas)]
    return tuple(ring for ring in (*holders, *replicas) if len(ring) > 1)
