"""Digests of replicas: which can be trusted, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.measure.refused import answered, refused_states
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.split import agreed_before, doubts_told, holders
from trainchaos.recovery.policy.strategy import StateFrom


def diverged(history: History, step: int | None = None) -> list[Event]:
    """Failures that named a process for holding a different state than most, at one step or all."""
    return [
        failure
        for failure in history.log.of(Kind.FAILURE_DETECTED)
        if failure.data["cause"] == "diverged" and step in (None, failure.step)
    ]


def sound_digests(history: History) -> Iterator[Event]:
    """State digests that can be trusted.

    Replicas are not compared after each step. So from the last agreement until a difference was
    found, the digests of the process that differed are left out (of all processes, if none could be
    named), and so are those of a process that held the same state and was gone when that was found,
    or was not named because the supervisor was lost meanwhile.
    Where the answer kept no state of the generation in which it was found, all digests of its later
    steps are left out: they were given up unseen, whatever else differed in them.
    Left out too are those of steps that the job gave up because nobody had compared them
    (``_given_up_in_doubt``), and digests of a state with a planted non-finite value, until it was
    refused. If the job completes without an answer to the failure, it ends with the wrong state:
    all count.
    """
    digests, refused = list(history.log.of(Kind.STATE_DIGEST)), refused_states(history)
    doubted = _given_up_in_doubt(history)
    differed: set[int] = set()
    for failure in diverged(history):
        if answered(history, failure):
            differed |= _that_differed(history, failure, digests)
    for event in digests:
        left_out = id(event) in differed or any(one.has(event) for one in refused)
        if not left_out and (event.step or 0) <= doubted.get(event.generation, math.inf):
            yield event


def _given_up_in_doubt(history: History) -> dict[int, int]:
    """Generation -> the step after which its states were doubted, for each one whose successor was
    told so as it formed, and went back to a checkpoint of that step or an earlier one, or found
    none to go back to before the job gave up.
    """
    given_up: dict[int, int] = {}
    numbers = [one.number for one in history.worked]
    resumed = {one.number: one.resume_step or 0 for one in history.worked}
    for started in history.log.of(Kind.GENERATION_STARTED):
        earlier = [number for number in numbers if number < started.generation]
        if not earlier or started.data["state"] != StateFrom.CHECKPOINT.value:
            continue
        back_to = resumed.get(started.generation, 0 if earlier == numbers else math.inf)
        for until, since in doubts_told(started):
            if until > earlier[-1] and back_to <= since:
                given_up[earlier[-1]] = min(since, given_up.get(earlier[-1], since))
    return given_up


def _that_differed(history: History, failure: Event, digests: Sequence[Event]) -> set[int]:
    """ids of the digests of states that were found to differ."""
    agreed = agreed_before(history, failure)
    named = [event for event in digests if _is_of(failure, agreed, event)]
    generation = history.generation(failure.generation)
    there = generation.members if generation is not None else ()
    states = {_state(event) for event in named}
    cut_short = any(
        taken.generation == failure.generation and taken.time_ns > failure.time_ns
        for taken in history.log.of(Kind.COORDINATOR_ADOPTED)
    )
    unnamed = [
        one for one in digests if (cut_short or one.actor not in there) and _state(one) in states
    ]
    later = [event for event in digests if _came_after(failure, event)]
    given_up = later if _kept_nothing(history, failure) else []
    return {id(event) for event in (*named, *unnamed, *given_up)}


def _came_after(failure: Event, digest: Event) -> bool:
    """Whether a digest is of a later step than the one that was found to differ, in the generation
    that ended for it.
    """
    return digest.generation == failure.generation and (digest.step or 0) > (failure.step or 0)


def _kept_nothing(history: History, failure: Event) -> bool:
    """Whether no later generation trained with a state of the one in which replicas were found to
    differ.
    """
    number, generation = failure.generation, history.generation(failure.generation)
    members = generation.members if generation is not None else ()
    later = (one for one in history.worked if one.number > number)
    return not any(
        holders(history, members, number, one.number) & set(one.members) for one in later
    )


def _state(digest: Event) -> tuple[Any, ...]:
    """A rank's state after a step of a generation, as a comparable key."""
    data = digest.data
    return digest.generation, digest.step, data["parameters"], data["optimizer"], data["scheduler"]


def _is_of(failure: Event, agreed: tuple[int, int], digest: Event) -> bool:
    """Whether a digest is of a state that was found to differ, taken after the last agreement and
    up to the end of the generation that the difference ended.
    """
    step, number = agreed
    last = math.inf if digest.generation == failure.generation else failure.step or 0
    since = step < (digest.step or 0) <= last and number <= digest.generation <= failure.generation
    return since and failure.data["process"] in (None, digest.actor)


def own_parts(digest: Event) -> dict[str, str]:
    """Of a state digest, the parts that may rightly differ from rank to rank."""
    own = ("buffers", "registered.")
    return {name: value for name, value in digest.data.items() if name.startswith(own)}


def final_digests(history: History) -> dict[int, dict[int, Event]]:
    """Step -> rank -> state digest, from the generation whose run of the step survived."""
    return history.once(_final_digests)


def _final_digests(history: History) -> dict[int, dict[int, Event]]:
    lineage = history.lineage
    found: dict[int, dict[int, Event]] = {}
    for event in sound_digests(history):
        run = lineage.get(event.step or 0)
        if run is not None and event.generation == run.generation:
            found.setdefault(run.step, {})[event.data["rank"]] = event
    return found


def by_shard(found: Mapping[int, Event], shards: int) -> dict[int, list[Event]]:
    """Digests of one step by shard; ``found``: by rank, see ``final_digests``."""
    parts: dict[int, list[Event]] = {}
    for rank, event in sorted(found.items()):
        parts.setdefault(rank % shards, []).append(event)
    return parts


def same_parameters(history: History, control: History) -> bool:
    """Whether the parameters equal the control arm's at the last step digested in both."""
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
