"""State transitions of checkpoints in a log: begun, then committed or failed; due ones begun;
restored by name.

Only for ranks with complete logs. A save in progress when its rank or its generation ends has no
end in the log. An in-memory save is logged as done with the next committed step, the last one
never.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.lifecycle.lives import complete_logs, own_lines
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.recovery.checkpoint.memory.header import is_memory

_ENDS = (Kind.CHECKPOINT_COMMITTED, Kind.CHECKPOINT_FAILED)
_OF_A_STEP = frozenset({Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_PART, *_ENDS})
_SAVES = _OF_A_STEP | {Kind.PARKED, Kind.ACTOR_ENDED}
_HOLDS = frozenset({Kind.STEP_COMMITTED, Kind.STATE_READY})
_Key = tuple[str, int | None]


def saves(history: History) -> Iterator[str]:
    """Contradictions in saves, by rank."""
    for name in sorted(complete_logs(history.log)):
        yield from _of_a_rank(history, name)
        yield from _of_a_step(history, name)


def _of_a_rank(history: History, name: str) -> Iterator[str]:
    open_: dict[_Key, Event] = {}
    lapsed: set[_Key] = set()  # given up with their generation; their end may be logged later
    log = history.log.actors[name]
    for event in [log.events[place] for place, kind in enumerate(log.kinds) if kind in _SAVES]:
        key = str(event.data.get("checkpoint")), event.data.get("shard")
        part = event.data["state"] if event.kind is Kind.CHECKPOINT_PART else ""
        if event.kind is Kind.CHECKPOINT_SAVING or part == "begun":
            unended = [each for each in open_.values() if not _in_memory(each)]
            if unended and not _in_memory(event):
                yield f"{name} began {key[0]} before it had ended {unended[0].data['checkpoint']}"
                open_ = {}
            open_[key] = event
        elif event.kind in _ENDS or part:
            if open_.pop(key, None) is None and key not in lapsed:
                how = part or event.kind.value.removeprefix("checkpoint_")
                yield f"{key[0]} was {how} by {name}, which never began it"
        elif event.kind is Kind.PARKED:
            lapsed |= open_.keys()
            open_ = {}
        elif event.kind is Kind.ACTOR_ENDED and history.outcome == "completed":
            left = [each for each in open_.values() if not _in_memory(each)]
            yield from (f"{name} never said how {e.data['checkpoint']} ended" for e in left)


def _of_a_step(history: History, name: str) -> Iterator[str]:
    """A checkpoint is named after its step, and begun only after that step."""
    held: int | None = None
    log = history.log.actors[name]
    for place, kind in enumerate(log.kinds):
        if kind in _HOLDS:
            held = log.steps[place]
        elif kind in _OF_A_STEP:
            called, step = str(log.events[place].data["checkpoint"]), log.steps[place]
            number = called.rpartition("-")[2]
            if not number.isdecimal() or int(number) != step:
                yield f"{name} says that {called} is of step {step}"
            if kind is Kind.CHECKPOINT_SAVING and held not in (None, step):
                yield f"{name} began {called} when it held step {held}"


def _in_memory(event: Event) -> bool:
    return is_memory(str(event.data.get("checkpoint")))


def due(history: History, every: int) -> Iterator[str]:
    """Checkpoints that the first rank had to begin after a step, but went on without."""
    log = history.log
    whole = complete_logs(log)
    begun = {
        (e.actor, e.generation, e.step) for e in log.of(Kind.CHECKPOINT_SAVING) if not _in_memory(e)
    }
    for run in history.runs:
        generation = history.generation(run.generation)
        first = generation.members[0] if generation else ""
        if run.step % every or first not in whole or (first, run.generation, run.step) in begun:
            continue
        if generation is not None and _went_on(history, generation, first, run.step):
            yield f"{first} committed step {run.step}, and no checkpoint of it was begun"


def due_in_memory(history: History, every: int) -> Iterator[str]:
    """In-memory checkpoints that ranks of the first replica had to begin after a step, but went on
    without: every one is begun, however busy the keeper is.
    """
    log = history.log
    whole = complete_logs(log)
    begun = {
        (e.actor, e.generation, e.step) for e in log.of(Kind.CHECKPOINT_SAVING) if _in_memory(e)
    }
    for run in history.runs:
        generation = history.generation(run.generation)
        if run.step % every or generation is None:
            continue
        took = {e.actor for e in run.batches} & {e.actor for e in run.commits}
        for name in generation.members[: history.shards]:
            if name not in whole & took or (name, run.generation, run.step) in begun:
                continue
            if _went_on(history, generation, name, run.step):
                yield (
                    f"{name} committed step {run.step}, and no checkpoint of it in memory was begun"
                )


def _went_on(history: History, generation: Generation, name: str, step: int) -> bool:
    """Whether a rank went on past the save after a step."""
    mine = [e for e in history.log.actors[name].events if e.generation == generation.number]
    later = any(e.kind is Kind.BATCH_TAKEN and (e.step or 0) > step for e in mine)
    ended = any(e.kind is Kind.ACTOR_ENDED for e in mine)
    return later or (ended and step == history.info.steps and history.outcome == "completed")


def acknowledged(history: History) -> Iterator[str]:
    """Checkpoints that were acknowledged to the coordinator, and that no rank committed."""
    log = history.log
    if set(log.actors) - complete_logs(log) - {own_lines(log)[0].actor}:
        return  # a rank with an incomplete log may have committed it
    known = {e.step for e in log.of(Kind.CHECKPOINT_COMMITTED)}
    for event in own_lines(log):
        if event.kind is Kind.GENERATION_READY and event.data["checkpoint"]:
            known.add(event.data["resume_step"])  # its rank may have died before it logged the save
        step = event.data["saved"] if event.kind is Kind.REPLICAS_AGREED else None
        if step is not None and step not in known:
            known.add(step)
            yield f"a checkpoint of step {step} was acknowledged, and no rank committed it"


def restored(history: History) -> Iterator[str]:
    """Generations whose members and coordinator disagree on what was restored."""
    log = history.log
    whole = complete_logs(log)
    for generation in history.generations:
        if generation.ready_ns is None or not set(generation.members) <= whole:
            continue
        taken = {
            e.data["source"]
            for e in log.of(Kind.STATE_READY)
            if e.generation == generation.number and e.data["origin"] == "checkpoint"
        }
        named, number = generation.checkpoint, generation.number
        if named is None and taken:
            yield (
                f"members of generation {number} restored {_names(taken)}, and it is said to have"
                " restored none"
            )
        elif named is not None and not taken:
            yield (
                f"generation {number} is said to have restored {named}, and none of its members did"
            )
        elif named is not None and named not in taken and None not in taken:
            yield (
                f"generation {number} is said to have restored {named}, and its members"
                f" {_names(taken)}"
            )


def _names(found: set[object]) -> str:
    return ", ".join(sorted(map(str, found)))
