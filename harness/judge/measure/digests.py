"""Digests of replicas: which may be believed, and whether they say the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaos.events.log import Event, Kind
from harness.judge.measure.refused import answered, refused_states
from harness.judge.record.history import History
from harness.judge.record.split import agreed_before


def diverged(history: History, step: int | None = None) -> list[Event]:
    """Failures by which a process was named for holding another state than most, of one step or of
    all.
    """
    return [
        failure
        for failure in history.log.of(Kind.FAILURE_DETECTED)
        if failure.data["cause"] == "diverged" and step in (None, failure.step)
    ]


def sound_digests(history: History) -> Iterator[Event]:
    """State digests, without those of a process that was found to differ, or of all where nobody
    could say which did, from the last agreement until that was noticed: replicas are not compared
    after each step. Nor those of one that held the same, and was gone when that was found. Nor
    those of a state in which a fault planted what is not finite, until it was refused. A job that
    completes without an answer to that ends with the wrong state: all count.
    """
    digests, refused = list(history.log.of(Kind.STATE_DIGEST)), refused_states(history)
    differed: set[int] = set()
    for failure in diverged(history):
        if answered(history, failure):
            differed |= _that_differed(history, failure, digests)
    for event in digests:
        if id(event) not in differed and not any(one.has(event) for one in refused):
            yield event


def _that_differed(history: History, failure: Event, digests: Sequence[Event]) -> set[int]:
    """ids of the digests that a difference explains."""
    agreed = agreed_before(history, failure)
    named = [event for event in digests if _is_of(failure, agreed, event)]
    generation = history.generation(failure.generation)
    there = generation.members if generation is not None else ()
    states = {_state(event) for event in named}
    gone = [one for one in digests if one.actor not in there and _state(one) in states]
    return {id(event) for event in (*named, *gone)}


def _state(digest: Event) -> tuple[Any, ...]:
    """What a rank held after which step of which generation."""
    data = digest.data
    return digest.generation, digest.step, data["parameters"], data["optimizer"], data["scheduler"]


def _is_of(failure: Event, agreed: tuple[int, int], digest: Event) -> bool:
    """Whether a digest is of a state that was found to differ, and was held until the generation
    ended for that.
    """
    step, number = agreed
    last = math.inf if digest.generation == failure.generation else failure.step or 0
    since = step < (digest.step or 0) <= last and number <= digest.generation <= failure.generation
    return since and failure.data["process"] in (None, digest.actor)


def final_digests(history: History) -> dict[int, dict[int, Event]]:
    """Step -> rank -> state digest, from the generation whose run of the step survived."""
    lineage = history.lineage
    found: dict[int, dict[int, Event]] = {}
    for event in sound_digests(history):
        run = lineage.get(event.step or 0)
        if run is not None and event.generation == run.generation:
            found.setdefault(run.step, {})[event.data["rank"]] = event
    return found


def by_shard(found: Mapping[int, Event], shards: int) -> dict[int, list[Event]]:
    """Digests of a step by the part of the model they are of; ``found``: by rank, see
    ``final_digests``.
    """
    parts: dict[int, list[Event]] = {}
    for rank, event in sorted(found.items()):
        parts.setdefault(rank % shards, []).append(event)
    return parts


def same_parameters(history: History, control: History) -> bool:
    """Whether the parameters agree with the control arm's at the last step both took a
    digest of.
    """
    mine, theirs = final_digests(history), final_digests(control)
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return True
    step = common[-1]
    ours, others = (by_shard(found[step], history.shards) for found in (mine, theirs))
    return all(
        len({event.data["parameters"] for event in (*ours.get(shard, ()), *others.get(shard, ()))})
        == 1
        for shard in ours.keys() | others.keys()
    )
