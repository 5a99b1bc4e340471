"""Replicas that differ although no comparison was due: the one reason for which a job may continue
or end with replicas that a fault made different.

The rule. A fault that changes a rank's state makes its replica differ from the rest, and nothing is
non-finite that would show it. Recovery can only detect that when states are compared. That happens

- after a step at which all members of a generation send digests: each ``verify_every`` steps,
  without it with each checkpoint, and after the last step (``recovery.policy.interval.compared``);
- when a generation has formed, before it trains, for the state of all its members.

Digests sent while there was no supervisor are compared after the takeover, and so are those of
which the lost supervisor had read only some: members repeat their last one to the new supervisor,
except those that were gone before. Where one is gone and another repeats its own, what was saved
since the last comparison is in doubt and no generation begins with it.

A comparison shows the change only while some members hold it and others do not, for the same part
of the model. Once all hold it (a spare copied it from the last survivor), or none does (all went
back to a checkpoint, or its holders are gone), there is nothing left to compare. The user chooses
how often a job compares, and thus what may happen in between: a rank with a changed state may
become the source of a replacement, or save, before the comparison. So a difference is not a defect
of recovery exactly if

- it is of a state that a fault changed: all members that do not hold such a state hold the same;
  and
- no comparison was due that could have shown that change, from the injection until the end.

A change that a comparison could have shown, and did not (random numbers that nothing draws), made
no difference, and is not followed.

Both are read from the log, and from the declarations of the kinds of fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
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
NS_PER_S = 1_000_000_000
UNDER_WAY_NS = 10_000_000
"""A message sent so shortly before the supervisor is lost may not have been read."""
PARTS = ("parameters", "optimizer", "scheduler")


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """A state that was changed in some ``processes`` in a step of a generation. ``alike``: of those
    that were changed in the same way, process -> the first of them.
    """

    processes: tuple[str, ...]
    generation: int
    step: int
    alike: Mapping[str, str] = field(default_factory=dict)

    def origins(self, history: History, number: int, step: int | None = None) -> dict[str, str]:
        """The holders of the change after a step of generation ``number`` (None: any), each with
        the hit process that its state comes from, or one that was changed alike.
        """
        if step is not None and (number, step) < (self.generation, self.step):
            return {}
        held = origins(history, self.processes, self.generation, number)
        return {name: self.alike.get(source, source) for name, source in held.items()}


def uncompared(tree: Tree, log: Log, step: int | None = None) -> bool:
    """Whether replicas differed (after this ``step``), and this module's rule covers all
    differences.
    """
    history = history_of(log)
    groups = _groups(history)
    differences = [digests for digests in groups if not _same(digests)]
    if step is not None and all(digests[0].step != step for digests in differences):
        return False
    changes = [
        one for one in _changes(history, groups) if not _without_effect(history, groups, one)
    ]
    return bool(differences) and all(
        _made_by_changes(history, digests, changes)
        and not any(_was_due(tree, history, one) for one in _behind(history, digests, changes))
        for digests in differences
    )


def _changes(history: History, groups: list[list[Event]]) -> list[StateChange]:
    """What faults changed, by generation and step."""
    hit: dict[tuple[int, int], list[str]] = defaultdict(list)
    written = _written(history.log)
    for one in episodes_of(history):
        if one.injected and one.changed_state:
            step = written.get((one.fault, one.occurrence), one.injected.step or 0)
            hit[one.injected.generation, step] += one.processes
    changes = [
        StateChange(processes=tuple(dict.fromkeys(names)), generation=generation, step=step)
        for (generation, step), names in hit.items()
    ]
    return [replace(one, alike=_alike(history, groups, one)) for one in changes]


def _written(log: Log) -> dict[tuple[str, int], int]:
    """(fault, occurrence) -> the step in which a rank changed its state. A value that misses an
    update is written a step after the injection.
    """
    return {
        (event.data["fault"], event.data["occurrence"]): event.step
        for event in log.of(Kind.FAULT_EFFECT)
        if event.step is not None and "after" in (event.data["evidence"] or {})
    }


def _alike(history: History, groups: list[list[Event]], change: StateChange) -> dict[str, str]:
    """Processes that were changed in the same way, by the first digests of each."""
    alike: dict[str, str] = {}
    for digests in groups:
        held = change.origins(history, digests[0].generation, digests[0].step or 0)
        first: dict[tuple[str, ...], str] = {}
        for event in digests:
            source = held.get(event.actor)
            if source is not None:
                value = tuple(event.data[part] for part in PARTS)
                alike.setdefault(source, first.setdefault(value, source))
    return alike


def _groups(history: History) -> list[list[Event]]:
    """Digests of one part of the model after one step, in the order of the log."""
    groups: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in sound_digests(history):
        key = (event.generation, event.step or 0, event.data["rank"] % history.shards)
        groups[key].append(event)
    return list(groups.values())


def _same(digests: list[Event], parts: tuple[str, ...] = PARTS) -> bool:
    return len({tuple(event.data[part] for part in parts) for event in digests}) <= 1


def _without_effect(history: History, groups: list[list[Event]], change: StateChange) -> bool:
    """Whether the first digests that could have shown a change, random numbers included, did not:
    some of those that sent them held it, and some did not.
    """
    for digests in groups:
        held = change.origins(history, digests[0].generation, digests[0].step or 0)
        if 0 < sum(event.actor in held for event in digests) < len(digests):
            return _same(digests, (*PARTS, "rng"))
    return False


def _made_by_changes(history: History, digests: list[Event], changes: list[StateChange]) -> bool:
    """Whether the members without a changed state hold the same."""
    number, step = digests[0].generation, digests[0].step or 0
    held = {name for one in changes for name in one.origins(history, number, step)}
    return _same([event for event in digests if event.actor not in held])


def _behind(
    history: History, digests: list[Event], changes: list[StateChange]
) -> list[StateChange]:
    """The changes held by processes whose digests differ."""
    number, step = digests[0].generation, digests[0].step or 0
    actors = {event.actor for event in digests}
    return [one for one in changes if actors & one.origins(history, number, step).keys()]


def _was_due(tree: Tree, history: History, change: StateChange) -> bool:
    """Whether a comparison that could have shown the change was due."""
    return any(
        _shows(history, change, generation)
        and (
            (generation.number > change.generation and generation.ready_ns is not None)
            or any(_steps_compared(tree, history, change, generation))
        )
        for generation in history.generations
        if generation.number >= change.generation
    )


def _shows(history: History, change: StateChange, generation: Generation) -> bool:
    """Whether the change makes members differ in some part of the model."""
    held = change.origins(history, generation.number)
    kept: dict[int, set[str | None]] = defaultdict(set)
    for rank, name in enumerate(generation.members):
        kept[generation.shard_of(rank)].add(held.get(name))
    return any(len(states) > 1 for states in kept.values())


def _steps_compared(
    tree: Tree, history: History, change: StateChange, generation: Generation
) -> Iterator[int]:
    """Steps of a generation, since the change, of which all members had to send a digest."""
    saving = {
        (event.generation, event.step) for event in history.log.of(Kind.STATE_DIGEST)
    }  # or after the last step, which is compared anyway
    every, steps = tree["workload"].get("verify_every"), history.info.steps
    for run in history.runs_of(generation.number):
        if (run.generation, run.step) < (change.generation, change.step):
            continue
        whole = {event.actor for event in run.commits} >= set(generation.members)
        saved = (run.generation, run.step) in saving
        if (
            whole
            and compared(run.step, every=every, steps=steps, saving=saved)
            and not _unheard(history, generation, run.step)
        ):
            yield run.step


def _unheard(history: History, generation: Generation, step: int) -> bool:
    """Whether a member's digest after a step reached no supervisor, the member had ended before the
    takeover, and the job did not go back to a checkpoint on the word of another member.
    """
    log = history.log
    made = {
        event.actor: event.time_ns
        for event in log.of(Kind.STATE_DIGEST)
        if (event.generation, event.step) == (generation.number, step)
    }
    ended = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_EXITED)}
    later = [one for one in history.generations if one.number > generation.number]
    went_back = bool(later) and later[0].state == StateFrom.CHECKPOINT.value
    for adopted in log.of(Kind.COORDINATOR_ADOPTED):
        before = {name for name, made_ns in made.items() if made_ns < adopted.time_ns}
        gone = {name for name in before if ended.get(name, adopted.time_ns) < adopted.time_ns}
        down_ns = adopted.time_ns - adopted.data["down_s"] * NS_PER_S
        unread = any(made[name] + UNDER_WAY_NS >= down_ns for name in gone)
        if unread and not (went_back and before - gone):
            return True
    return False
