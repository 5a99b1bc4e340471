"""Which part of the model each waiting spare was told to follow, and whether it could be so.

These lines decide whether a spare would have served a lost rank, so they are not believed unseen:
a spare that is said to follow another part would excuse that the job shrank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.harness.judge.lifecycle.lives import own_lines
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.recovery.policy.strategy import ANNOUNCED, Cause

_LIVES_ON = (*ANNOUNCED, Cause.NONFINITE, Cause.DIVERGED, Cause.ERROR)
"""Causes of a failure after which the process may wait on."""


def followed(history: History, before_ns: int) -> dict[str, int]:
    """Spare -> the part that it was last told to follow before a time."""
    return {
        str(event.data["process"]): int(event.data["shard"])
        for event in history.log.of(Kind.SPARE_PLACED)
        if event.time_ns < before_ns
    }


def places(history: History, *, live: bool) -> Iterator[str]:
    """Contradictions in what spares were told to follow. A spare that was started, and never had a
    rank, follows one part for life, the one that fewest followed; with a rank it holds that part.
    ``live``: spares were to follow the job.

    Nothing is said where lines of the supervisor itself are missing.
    """
    placed = list(history.log.of(Kind.SPARE_PLACED))
    own = history.log.actors.get(ORCHESTRATOR)
    if not placed or own is None or own.problems:
        return
    first = placed[0].data["process"]
    if not live:
        yield f"{first} was told to follow a part of the model, without sync: live"
    if history.shards < 2:
        yield f"{first} was told to follow a part of a model that has but one"
        return
    walk = _Walk(history)
    for event in own_lines(history.log):
        yield from walk.see(event)
    for actor in sorted({event.actor for event in placed} - {ORCHESTRATOR}):
        yield f"{actor} wrote what a spare was told to follow, which only the supervisor can"


@dataclass
class _Walk:
    """The supervisor's lines up to one of them. ``part``: of spares that were told one; ``held``:
    of processes that ever had a rank; ``troubled``: processes that were lost or may be about to
    be, so that a supervisor may count them or not; ``gone``: those that it knows to be lost.
    """

    history: History
    spawned: set[str] = field(default_factory=set)
    part: dict[str, int] = field(default_factory=dict)
    told_ns: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    troubled: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    failed: bool = False
    adopted_ns: int | None = None
    node_lost: bool = False

    def see(self, event: Event) -> Iterator[str]:
        """The next line, and what contradicts those before it."""
        name = str(event.data.get("process"))
        match event.kind:
            case Kind.PROCESS_SPAWNED:
                self.spawned.add(name)
            case Kind.PROCESS_EXITED:
                # its supervisor learns of an end that it did not ask for when it detects a failure
                (self.gone if event.data["expected"] else self.troubled).add(name)
            case Kind.FAILURE_DETECTED:
                self.failed = True
                (self.troubled if event.data["cause"] in _LIVES_ON else self.gone).add(name)
            case Kind.NODE_LOST:
                self.node_lost = True
            case Kind.COORDINATOR_ADOPTED:
                self.adopted_ns = event.time_ns
            case Kind.GENERATION_STARTED:
                yield from self._begins(event)
            case Kind.SPARE_PLACED:
                yield from self._placed(event, name, int(event.data["shard"]))

    def _begins(self, event: Event) -> Iterator[str]:
        generation = self.history.generation(event.generation)
        self.members, self.failed = tuple(event.data["members"]), False
        for rank, name in enumerate(self.members):
            shard = rank % (generation or self.history).shards
            if self.part.get(name, shard) != shard:
                yield (
                    f"{name} was told to follow part {self.part[name]}, and holds part {shard} as"
                    f" rank {rank} of generation {event.generation}"
                )
            self.held[name] = shard

    def _placed(self, event: Event, name: str, shard: int) -> Iterator[str]:
        shards = self.history.shards
        if name not in self.spawned:
            yield f"{name} was told to follow part {shard}, and had not been started"
        if name in self.members:
            yield f"{name} was told to follow part {shard}, and had a rank"
        elif name in self.held and self.adopted_ns is None:
            # whoever takes over knows of no rank that a process was never told of
            yield f"{name} was told to follow part {shard}, and had had a rank before"
        if not 0 <= shard < shards:
            yield f"{name} was told to follow part {shard}, the model has {shards}"
        elif name not in self.part:
            yield from self._unbalanced(event, name, shard)
        elif self.part[name] != shard and not self._may_change(event, name):
            yield f"{name} was told to follow part {shard}, after part {self.part[name]}"
        self.part[name], self.told_ns[name] = shard, event.time_ns

    def _may_change(self, event: Event, name: str) -> bool:
        """Whether the spare may never have heard of its first part: the supervisor that wrote it
        down was lost then, and the spare has followed nothing until now.
        """
        if self.adopted_ns is None or self.adopted_ns < self.told_ns[name]:
            return False
        synced = self.history.log.of(Kind.SPARE_SYNCED)
        return not any(e.actor == name and e.time_ns < event.time_ns for e in synced)

    def _unbalanced(self, event: Event, name: str, shard: int) -> Iterator[str]:
        """Whether another part was followed by fewer, however those are counted of which it is not
        known whether they waited.
        """
        if self.adopted_ns is not None or self.node_lost:
            return  # which of the spares are known to wait is not in the log
        surely, perhaps = Counter[int](), Counter[int]()
        for other in {**self.part, **self.held}:
            if other in self.members or other in self.gone:
                continue
            part = self.held.get(other, self.part.get(other, shard))
            (perhaps if self._is_doubtful(event, other) else surely)[part] += 1
        most = {part: surely[part] + perhaps[part] for part in range(self.history.shards)}
        fewest = min(most, key=lambda part: most[part])
        if surely[shard] > most[fewest]:
            yield (
                f"{name} was told to follow part {shard}, which {surely[shard]} that wait follow,"
                f" and {most[fewest]} follow part {fewest}"
            )

    def _is_doubtful(self, event: Event, name: str) -> bool:
        """Whether a supervisor may count a process that waits, or not: one that had a rank before,
        is about to end, or is to take a rank that was lost.
        """
        asked_ns = self._asked_ns.get(name)
        return (
            name in self.held
            or name in self.troubled
            or (asked_ns is not None and asked_ns <= event.time_ns)
            or (self.failed and name in self._next_members(event))
        )

    def _next_members(self, event: Event) -> tuple[str, ...]:
        later: Iterator[Generation] = (
            row for row in self.history.generations if row.started_ns >= event.time_ns
        )
        return next((row.members for row in later), ())

    @cached_property
    def _asked_ns(self) -> Mapping[str, int]:
        """When each process was asked to end."""
        return {
            str(event.data["process"]): int(event.data["asked_ns"])
            for event in self.history.log.of(Kind.PROCESS_EXITED)
            if event.data.get("asked_ns")
        }
