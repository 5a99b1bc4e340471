"""Digests of replicas: which can be trusted, and whether they agree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import episodes_of
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.split import agreed_before, diverged, doubts_told, holders
from trainchaos.recovery.policy.strategy import StateFrom


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
        if _answered(history, failure):
            differed |= _that_differed(history, failure, digests)
    for event in digests:
        left_out = id(event) in differed or any(
            state.process == event.actor and state.at(event.generation, event.step or 0)
            for state in refused
        )
        if not left_out and (event.step or 0) <= doubted.get(event.generation, math.inf):
            yield event


def _answered(history: History, failure: Event) -> bool:
    """Whether the job did not complete, or completed in a later generation than that of the
    failure.
    """
    later = any(one.number > failure.generation for one in history.worked)
    return later or history.outcome != "completed"


def _given_up_in_doubt(history: History) -> dict[int, int]:
    """Generation -> the step after which its states were doubted, for each one whose successor was
    told so as it formed, and went back to a checkpoint of that step or an earlier one, or found
    none to go back to before the job gave up.
    """
    given_up: dict[int, int] = {}
    resumed = {one.number: one.resume_step or 0 for one in history.worked}
    for started in history.log.of(Kind.GENERATION_STARTED):
        last = max((number for number in resumed if number < started.generation), default=None)
        if last is None or started.data["state"] != StateFrom.CHECKPOINT.value:
            continue
        back_to = resumed.get(started.generation, 0 if last == max(resumed) else math.inf)
        for until, since in doubts_told(started):
            if until > last and back_to <= since:
                given_up[last] = min(since, given_up.get(last, since))
    return given_up


def _that_differed(history: History, failure: Event, digests: Sequence[Event]) -> set[int]:
    """ids of the digests of states that were found to differ: taken after the last agreement and up
    to the end of the generation that the difference ended.
    """
    here, at, named = failure.generation, failure.step or 0, failure.data["process"]
    agreed, since = agreed_before(history, failure)
    generation = history.generation(here)
    members = generation.members if generation is not None else ()
    found = {
        id(event): event
        for event in digests
        if agreed < (event.step or 0) <= (math.inf if event.generation == here else at)
        and since <= event.generation <= here
        and named in (None, event.actor)
    }
    states = {_state(event) for event in found.values()}
    cut_short = any(
        taken.generation == here and taken.time_ns > failure.time_ns
        for taken in history.log.of(Kind.COORDINATOR_ADOPTED)
    )
    kept = any(
        holders(history, members, here, one.number) & set(one.members)
        for one in history.worked
        if one.number > here
    )
    return set(found) | {
        id(event)
        for event in digests
        if ((cut_short or event.actor not in members) and _state(event) in states)
        or (not kept and event.generation == here and (event.step or 0) > at)
    }


def _state(digest: Event) -> tuple[object, ...]:
    """A rank's state after a step of a generation, as a comparable key."""
    data = digest.data
    return digest.generation, digest.step, data["parameters"], data["optimizer"], data["scheduler"]


def own_parts(digest: Event) -> dict[str, str]:
    """Of a state digest, the parts that may rightly differ from rank to rank."""
    own = ("buffers", "registered.")
    return {name: value for name, value in digest.data.items() if name.startswith(own)}


def final_digests(history: History) -> dict[int, dict[int, Event]]:
    """Step -> rank -> state digest, from the generation whose run of the step survived."""
    return history.once(_final_digests)


def _final_digests(history: History) -> dict[int, dict[int, Event]]:
    lineage = history.lineage
    found: dict[int, dict[int, Event]] = defaultdict(dict)
    for event in sound_digests(history):
        run = lineage.get(event.step or 0)
        if run is not None and event.generation == run.generation:
            found[run.step][event.data["rank"]] = event
    return dict(found)


def by_shard(found: Mapping[int, Event], shards: int) -> dict[int, list[Event]]:
    """Digests of one step by shard; ``found``: by rank, see ``final_digests``."""
    parts: dict[int, list[Event]] = defaultdict(list)
    for rank, event in sorted(found.items()):
        parts[rank % shards].append(event)
    return dict(parts)


def same_parameters(history: History, control: History) -> bool:
    """Whether the parameters equal the control arm's at the last step digested in both."""
    mine, theirs = final_digests(history), final_digests(control)
    step = max(mine.keys() & theirs.keys(), default=None)
    if step is None:
        return True
    both = [by_shard(found[step], history.shards) for found in (mine, theirs)]
    return all(
        len({event.data["parameters"] for found in both for event in found.get(shard, ())}) == 1
        for shard in both[0].keys() | both[1].keys()
    )


@dataclass(frozen=True, kw_only=True)
class RefusedState:
    """A state of ``process`` that a fault made non-finite and that was refused, from the step of
    the injection to the step of the failure that named the process. ``held``: the generations
    between, in which the process had not yet taken another state.
    """

    process: str
    since: tuple[int, int]
    until: tuple[int, int]
    held: frozenset[int]

    def at(self, generation: int, step: int) -> bool:
        """Whether the process held it after a step."""
        return self.since <= (generation, step) <= self.until and generation in self.held


def refused_states(history: History) -> list[RefusedState]:
    """All refused states. A rank counts only if it reported holding such a value itself, and only
    until it was first named for a non-finite value: later a sample may be the cause.
    """
    failures: dict[str, list[Event]] = {}
    for failure in history.log.of(Kind.FAILURE_DETECTED):
        if failure.data["cause"] == "nonfinite" and failure.data["process"] is not None:
            failures.setdefault(failure.data["process"], []).append(failure)
    found = (
        _refused(history, episode, process, named)
        for episode in (episodes_of(history) if failures else ())
        if episode.changed_state and not all(map(math.isfinite, episode.planted))
        for process, named in failures.items()
    )
    return [state for state in found if state is not None]


def _refused(
    history: History, episode: Episode, process: str, named: Sequence[Event]
) -> RefusedState | None:
    injected = episode.injected
    failure = next((one for one in named if injected and injected.time_ns <= one.time_ns), None)
    if injected is None or failure is None or not _answered(history, failure):
        return None
    first, last = injected.generation, failure.generation
    held = frozenset(
        number
        for number in range(first, last + 1)
        if process in holders(history, episode.processes, first, number)
    )
    since, until = (first, injected.step or 0), (last, failure.step or 0)
    state = RefusedState(process=process, since=since, until=until, held=held)
    return state if last in held else None
