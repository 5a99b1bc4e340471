"""Which processes hold a state that a fault changed, and since when replicas may have differed.

A changed state stays with its process until the process takes another one, from a peer or a
checkpoint, and spreads to every process that copies it. So a difference may be found generations
after the fault, on a process that no fault hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.recovery.policy.doubts import Doubt, in_doubt

KEEPING = ("peer", "kept")
"""State sources of a generation whose members go on with what they hold."""


def diverged(history: History, step: int | None = None) -> list[Event]:
    """Failures that named a process for holding a different state than most, at one step or all."""
    return [
        failure
        for failure in history.log.of(Kind.FAILURE_DETECTED)
        if failure.data["cause"] == "diverged" and step in (None, failure.step)
    ]


def holders(history: History, hit: Iterable[str], since: int, until: int) -> frozenset[str]:
    """Processes whose state in generation ``until`` derives from that of the ``hit`` processes,
    which was changed in generation ``since``.
    """
    return frozenset(origins(history, hit, since, until))


def origins(history: History, hit: Iterable[str], since: int, until: int) -> dict[str, str]:
    """Each of the ``holders`` -> the ``hit`` process that its state comes from."""
    held = {name: name for name in hit}
    taken = {(event.generation, event.actor) for event in history.log.of(Kind.STATE_READY)}
    started = history.log.of(Kind.GENERATION_STARTED)
    for event in sorted(started, key=lambda event: event.generation):
        if not since < event.generation <= until:
            continue
        took = {name for name in event.data["members"] if (event.generation, name) in taken}
        if event.data["state"] not in KEEPING:
            held = {name: root for name, root in held.items() if name not in took}
            continue
        given = (event.data.get("sources") or {}).items()
        sources = {name: source for name, source in given if name in took}
        copies = {name: held[source] for name, source in sources.items() if source in held}
        held = {name: root for name, root in held.items() if name not in sources} | copies
    return held


def outvoted(changed: Collection[str], generation: Generation | None, named: str | None) -> bool:
    """Whether the process ``named`` for differing held the right state, and most holders of the
    same part of the model a ``changed`` one. The majority decides which replica differs, so the
    right one is blamed; that the others are wrong is reported by ``loss-equality``.
    """
    members = generation.members if generation is not None else ()
    if generation is None or named not in members or named in changed:
        return False
    shard = generation.shard_of(members.index(named))
    alike = [name for rank, name in enumerate(members) if generation.shard_of(rank) == shard]
    return 2 * len(set(changed) & set(alike)) > len(alike)


def tied(changed: Collection[str], generation: Generation | None) -> bool:
    """Whether, for some part of the model, at least half of its holders have a changed state, so
    that the unchanged ones are not a majority.
    """
    if generation is None:
        return False
    every = Counter(generation.shard_of(rank) for rank in range(generation.world))
    mine = Counter(
        generation.shard_of(rank) for rank, name in enumerate(generation.members) if name in changed
    )
    return any(2 * count >= every[shard] for shard, count in mine.items())


def agreed_before(history: History, failure: Event) -> tuple[int, int]:
    """(step, generation) at which replicas last agreed, or all started from one state, before they
    were found to differ.
    """
    number, before_ns = failure.generation, failure.time_ns
    since_ns, found = 0, (0, 0)
    for one in sorted(history.worked, key=lambda one: one.number):
        began_ns = one.ready_ns or one.started_ns
        if one.state not in KEEPING and one.number <= number and began_ns < before_ns:
            since_ns, found = began_ns, (one.resume_step or 0, one.number)
    own = history.generation(number)
    joined = own is None or own.ready_ns is None or own.ready_ns > before_ns
    last = (failure.step or 0) - (not joined)
    began = found[0]
    for event in history.log.of(Kind.REPLICAS_AGREED):
        step = event.step or 0
        if since_ns <= event.time_ns < before_ns and began <= step <= last and step > found[0]:
            found = (step, event.generation)
    return found


def changed_by(history: History, episodes: Iterable[Episode], failure: Event) -> frozenset[str]:
    """Processes that held a state changed by these episodes at the time of a failure."""
    return frozenset(
        name
        for one in episodes
        if one.changed_state and one.injected and one.injected.time_ns <= failure.time_ns
        for name in holders(history, one.processes, one.injected.generation, failure.generation)
    )


def explained_by_state(history: History, episodes: list[Episode]) -> dict[int, list[Event]]:
    """Index of an episode -> differences between replicas that its changed state explains: those
    blamed on a holder of the state, and those that follow from how many held a changed state.
    """
    found: dict[int, list[Event]] = {}
    for failure in diverged(history):
        generation, named = history.generation(failure.generation), failure.data["process"]
        each = {index: changed_by(history, (one,), failure) for index, one in enumerate(episodes)}
        every = frozenset[str]().union(*each.values())
        by_number = tied(every, generation) if named is None else outvoted(every, generation, named)
        members = generation.members if generation is not None else ()
        for index, held in each.items():
            if named in held or (by_number and held & set(members)):
                found.setdefault(index, []).append(failure)
    return found


def doubts_told(started: Event) -> tuple[Doubt, ...]:
    """The doubts of which the members of a generation learned as it started; see
    ``recovery.policy.doubts``.
    """
    return tuple((before, step) for before, step in started.data.get("doubts") or ())


def doubtful(history: History, deleted: Event, step: int, saved_in: int) -> bool:
    """Whether a checkpoint may hold the state of a replica that was found to differ, or that nobody
    compared (saved in a time without a supervisor, as the next generation was told), so that it is
    rightly deleted.
    """
    until_ns = deleted.time_ns + history.log.clocks.bound_ns(deleted)
    taken_over = [event.generation for event in history.log.of(Kind.COORDINATOR_ADOPTED)]
    for started in history.log.of(Kind.GENERATION_STARTED):
        told = in_doubt(doubts_told(started), generation=saved_in, step=step)
        meanwhile = any(saved_in <= number < started.generation for number in taken_over)
        if told and meanwhile and started.time_ns <= until_ns:
            return True
    found = (f for f in diverged(history) if f.time_ns <= until_ns and saved_in <= f.generation)
    return any(step > agreed_before(history, failure)[0] for failure in found)
