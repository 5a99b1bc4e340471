"""Replicas that differ although no comparison was due: the one reason for which a job may continue
or end with replicas that a fault made different.

A fault that changes a rank's state to finite values can only be detected where states are compared:

- after a step at which all members of a generation send digests: each ``verify_every`` steps,
  without it with each checkpoint, and after the last step (``recovery.policy.interval.compared``).
  Members repeat their last digests to a new supervisor, except those that were gone before; where
  one repeats its own, what was saved since the last comparison is in doubt;
- when a generation has formed, before it trains, for the state of all its members.

A comparison shows a change only while some members hold it and others do not, for the same part of
the model. So a difference is not a defect of recovery exactly if

- all members that do not hold a state that a fault changed hold the same; and
- no comparison was due that could have shown that change, from the injection until the end.

A change that a comparison could have shown, and did not (random numbers that nothing draws), made
no difference, and is not followed. All is read from the log, and from what the kinds of fault
declare (docs/search.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.judge.measure.digests import sound_digests
from trainchaos.harness.judge.record.episodes import episodes_of
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.split import origins
from trainchaos.recovery.policy.interval import compared
from trainchaos.recovery.policy.strategy import StateFrom

Tree = Mapping[str, Any]
At = tuple[int, int]
NS_PER_S = 1_000_000_000
UNDER_WAY_NS = 10_000_000
"""A message sent so shortly before the supervisor is lost may not have been read."""
PARTS = ("parameters", "optimizer", "scheduler")


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A state that was changed in some ``processes``. ``at``: generation and step; ``alike``: of
    those that were changed in the same way, process -> the first of them.
    """

    processes: tuple[str, ...]
    at: At
    alike: Mapping[str, str] = field(default_factory=dict)

    def holders(self, history: History, number: int, step: int | None = None) -> dict[str, str]:
        """Who holds the change after a step of generation ``number`` (None: any), each with the hit
        process that its state comes from, or one that was changed alike.
        """
        if step is not None and (number, step) < self.at:
            return {}
        held = origins(history, self.processes, self.at[0], number)
        return {name: self.alike.get(source, source) for name, source in held.items()}


@dataclass(frozen=True, kw_only=True)
class _Digests:
    """Those of one part of the model after one step. ``at``: generation and step."""

    at: At
    events: list[Event]

    def same(self, parts: tuple[str, ...] = PARTS, but: Collection[str] = ()) -> bool:
        """Whether all say the same, ``but`` those of some members."""
        others = (event for event in self.events if event.actor not in but)
        return len({tuple(event.data[part] for part in parts) for event in others}) <= 1


def uncompared(tree: Tree, log: Log, step: int | None = None) -> bool:
    """Whether replicas differed (after this ``step``), and this module's rule covers all
    differences.
    """
    record = _Record(history_of(log), tree["workload"].get("verify_every"))
    differing = [digests for digests in record.digests if not digests.same()]
    if step is not None and all(digests.at[1] != step for digests in differing):
        return False
    return bool(differing) and all(map(record.excuses, differing))


class _Record:
    """What a log shows of replicas. ``every``: steps between comparisons, None: with checkpoints.
    ``digests``: in the order of the log; ``changes``: those made by faults, by generation and step,
    that could make a difference.
    """

    def __init__(self, history: History, every: int | None) -> None:
        self._history, self._every = history, every
        groups: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
        for event in sound_digests(history):
            part = event.data["rank"] % history.shards
            groups[event.generation, event.step or 0, part].append(event)
        self.digests = [
            _Digests(at=(number, step), events=events)
            for (number, step, _), events in groups.items()
        ]
        changes = [replace(change, alike=self._alike(change)) for change in self._made()]
        self.changes = [change for change in changes if not self._without_effect(change)]

    def excuses(self, digests: _Digests) -> bool:
        """Whether members without a changed state hold the same, and no comparison was due that
        could have shown the changes of the others.
        """
        held = [change.holders(self._history, *digests.at) for change in self.changes]
        actors = {event.actor for event in digests.events}
        return digests.same(but=set().union(*held)) and not any(
            actors & holders.keys() and self._was_due(change)
            for change, holders in zip(self.changes, held, strict=True)
        )

    def _made(self) -> Iterator[_Change]:
        """What faults changed."""
        # a value that misses an update is written a step after the injection
        written = {
            (event.data["fault"], event.data["occurrence"]): event.step
            for event in self._history.log.of(Kind.FAULT_EFFECT)
            if event.step is not None and "after" in (event.data["evidence"] or {})
        }
        hit: dict[At, list[str]] = defaultdict(list)
        for episode in episodes_of(self._history):
            if episode.injected and episode.changed_state:
                step = episode.injected.step or 0
                step = written.get((episode.fault, episode.occurrence), step)
                hit[episode.injected.generation, step] += episode.processes
        for at, names in hit.items():
            yield _Change(processes=tuple(dict.fromkeys(names)), at=at)

    def _alike(self, change: _Change) -> dict[str, str]:
        """Processes that were changed in the same way, by the first digests of each."""
        alike: dict[str, str] = {}
        for digests in self.digests:
            held = change.holders(self._history, *digests.at)
            first: dict[tuple[str, ...], str] = {}
            for event in digests.events:
                source = held.get(event.actor)
                if source is not None:
                    value = tuple(event.data[part] for part in PARTS)
                    alike.setdefault(source, first.setdefault(value, source))
        return alike

    def _without_effect(self, change: _Change) -> bool:
        """Whether the first digests that could have shown a change, random numbers included, did
        not: some of those that sent them held it, and some did not.
        """
        for digests in self.digests:
            held = change.holders(self._history, *digests.at)
            if 0 < sum(event.actor in held for event in digests.events) < len(digests.events):
                return digests.same((*PARTS, "rng"))
        return False

    def _was_due(self, change: _Change) -> bool:
        """Whether a comparison that could have shown the change was due."""
        return any(
            self._shows(change, generation)
            and (
                (generation.number > change.at[0] and generation.ready_ns is not None)
                or self._compared(change, generation)
            )
            for generation in self._history.generations
            if generation.number >= change.at[0]
        )

    def _shows(self, change: _Change, generation: Generation) -> bool:
        """Whether the change makes members differ in some part of the model."""
        held = change.holders(self._history, generation.number)
        kept: dict[int, set[str | None]] = defaultdict(set)
        for rank, name in enumerate(generation.members):
            kept[generation.shard_of(rank)].add(held.get(name))
        return any(len(states) > 1 for states in kept.values())

    def _compared(self, change: _Change, generation: Generation) -> bool:
        """Whether there is a step of a generation, since the change, of which all members had to
        send a digest.
        """
        history, members = self._history, set(generation.members)
        # or after the last step, which is compared anyway
        saving = {(event.generation, event.step) for event in history.log.of(Kind.STATE_DIGEST)}
        return any(
            at >= change.at
            and {event.actor for event in run.commits} >= members
            and compared(run.step, every=self._every, steps=history.info.steps, saving=at in saving)
            and not self._unheard(generation, run.step)
            for run in history.runs_of(generation.number)
            for at in [(run.generation, run.step)]
        )

    def _unheard(self, generation: Generation, step: int) -> bool:
        """Whether a member's digest after a step reached no supervisor, the member had ended before
        the takeover, and the job did not go back to a checkpoint on the word of another member.
        """
        log = self._history.log
        made = {
            event.actor: event.time_ns
            for event in log.of(Kind.STATE_DIGEST)
            if (event.generation, event.step) == (generation.number, step)
        }
        ended = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_EXITED)}
        later = [one for one in self._history.generations if one.number > generation.number]
        went_back = bool(later) and later[0].state == StateFrom.CHECKPOINT.value
        for adopted in log.of(Kind.COORDINATOR_ADOPTED):
            before = {name for name, made_ns in made.items() if made_ns < adopted.time_ns}
            gone = {name for name in before if ended.get(name, adopted.time_ns) < adopted.time_ns}
            down_ns = adopted.time_ns - adopted.data["down_s"] * NS_PER_S
            unread = any(made[name] + UNDER_WAY_NS >= down_ns for name in gone)
            if unread and not (went_back and before - gone):
                return True
        return False
