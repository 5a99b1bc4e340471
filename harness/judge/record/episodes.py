"""Faults paired with the failures they caused, from which incidents, detection and outcomes follow.

A failure belongs to an injection if it blames one of the injection's targets and comes after it,
before the next injection on the same target. An injection may explain several failures: all
processes of a lost node, or a notice and the exit that follows when it is ignored; the first counts
as its detection. When replicas differ, a failure without a majority blames no process, and one
where most hold a changed state blames a process that does not. Such a failure belongs to every
injection whose changed state was still held (``harness.judge.record.split``). A remaining failure
goes to the newest injection that has none (the blame may be wrong, which the ``detection`` checker
reports), unless another injection lies between. A non-finite value that blames no process may also
go to an injection that so far only explains a difference between replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.command_end import take_ends
from trainchaos.harness.judge.record.episode import Episode, processes_hit
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.record.split import changed_by, explained_by_state, holders

# occurrence number of a planned fault that was never injected; real ones count from 0
NEVER_FIRED = -1
_STUCK = ("hang", "error")
"""Causes for which the job makes no progress: a rank is silent or a collective fails."""


def episodes_of(history: History) -> tuple[Episode, ...]:
    """Every occurrence of every fault in order of injection, then the planned faults that never
    fired.
    """
    log = history.log
    planned = {event.data["fault"]: event for event in log.of(Kind.FAULT_PLANNED)}
    marks = {
        kind: _by_occurrence(log.of(kind))
        for kind in (
            Kind.FAULT_LANDED,
            Kind.FAULT_FAILED,
            Kind.FAULT_HEALED,
            Kind.FAULT_EFFECT,
        )
    }
    found: list[Episode] = []
    for event in log.of(Kind.FAULT_INJECTED):
        key = (event.data["fault"], event.data["occurrence"])
        failed = marks[Kind.FAULT_FAILED].get(key)
        if failed is not None and failed.data.get("again"):
            continue  # too late for its point and armed again: the next occurrence counts
        process, rank = _target_of(history, event)
        found.append(
            Episode(
                fault=key[0],
                kind=event.data["kind"],
                occurrence=key[1],
                target=dict(event.data["target"] or {}),
                process=process,
                rank=rank,
                planned=planned.get(key[0]),
                injected=event,
                landed=marks[Kind.FAULT_LANDED].get(key),
                failed=failed,
                healed=marks[Kind.FAULT_HEALED].get(key),
                processes=processes_hit(event) or ((process,) if process is not None else ()),
                replica=_replica(history, event, process),
                over_ns=_over_ns(history, marks[Kind.FAULT_EFFECT].get(key)),
            )
        )
    fired = {episode.fault for episode in found}
    idle = [_never_fired(event) for name, event in planned.items() if name not in fired]
    return (*_with_failures(history, found, list(log.of(Kind.FAILURE_DETECTED))), *idle)


def unclaimed_failures(history: History, episodes: Iterable[Episode]) -> list[Event]:
    """Failures that no episode explains."""
    claimed = {id(failure) for episode in episodes for failure in episode.failures}
    return [event for event in history.log.of(Kind.FAILURE_DETECTED) if id(event) not in claimed]


def _by_occurrence(events: Iterable[Event]) -> dict[tuple[str, int], Event]:
    found: dict[tuple[str, int], Event] = {}
    for event in events:
        found.setdefault((event.data["fault"], event.data["occurrence"]), event)
    return found


def _target_of(history: History, event: Event) -> tuple[str | None, int | None]:
    target = event.data["target"] or {}
    process, rank = target.get("process"), target.get("rank")
    generation = history.generation_at(event.time_ns)
    members = generation.members if generation else ()
    if process is None and rank is not None and rank < len(members):
        process = members[rank]
    if process in members:
        rank = members.index(process)
    return process, rank


def _replica(history: History, event: Event, process: str | None) -> tuple[str, ...]:
    """Processes that held the same sharded copy of the model as the one that was hit."""
    generation = history.generation_at(event.time_ns)
    if generation is None or generation.shards == 1 or process not in generation.members:
        return ()
    first = generation.members.index(process) // generation.shards * generation.shards
    return generation.members[first : first + generation.shards]


def _over_ns(history: History, effect: Event | None) -> float:
    """When a fault that holds its target for a given time had let it go, at the latest."""
    held_s = effect.data["evidence"].get("held_s") if effect is not None else None
    if effect is None or not isinstance(held_s, int | float):
        return float("inf")
    return effect.time_ns + held_s * NS + history.log.clocks.bound_ns(effect)


def _never_fired(event: Event) -> Episode:
    return Episode(
        fault=event.data["fault"],
        kind=event.data["kind"],
        occurrence=NEVER_FIRED,
        target=dict(event.data["target"] or {}),
        planned=event,
    )


def _with_failures(
    history: History, episodes: list[Episode], failures: list[Event]
) -> list[Episode]:
    paired: dict[int, list[Event]] = {}
    states, seen = explained_by_state(history, episodes, failures), _seen(history, failures)
    left = [f for f in failures if not any(f in found for found in states.values())]
    for direct in (True, False):
        for index, episode in enumerate(episodes):
            # Explaining a divergence does not exclude values too large to blame on a rank.
            values_too = not direct and paired.get(index) == states.get(index, [])
            # Nor does being declared hung exclude that the job seemed stuck before that.
            stuck_too = not direct and episode.seems_still
            excluded = index in paired and not (values_too or stuck_too)
            if excluded or episode.injected is None or episode.missed:
                continue
            start = episode.injected.time_ns
            ends = _ends(history, episodes, index, seen, same_target=direct)
            values = _spoilt_everywhere(episodes, index) if direct else float("inf")
            due = [
                f
                for f in left
                if start <= seen[id(f)] < min(ends(f), values if _of_values(f) else float("inf"))
                and not _was_over(episode, f, seen[id(f)])
                and (_of_values(f) or index not in paired or (stuck_too and _nameless_stall(f)))
            ]
            if direct:
                found = [f for f in due if _explains(history, episode, f)]
            elif stuck_too:
                found = [f for f in due if _nameless_stall(f)] or _first_of(episode, due)
            else:
                found = _first_of(episode, due)
            found += paired.get(index, states.get(index, []))
            found.sort(key=lambda failure: failure.time_ns)
            found.sort(key=lambda failure: failure.data["process"] not in episode.processes)
            if found:
                paired[index] = found
                left = [f for f in left if f not in found]
        left = [f for f in left if not any(f in found for found in paired.values())]
        left = take_ends(history, paired.values(), left)
    return [
        replace(episode, failure=paired[index][0], others=tuple(paired[index][1:]))
        if index in paired
        else episode
        for index, episode in enumerate(episodes)
    ]


def _seen(history: History, failures: Iterable[Event]) -> dict[int, int]:
    """id of a failure -> when it was seen, which excludes later injections as its cause.

    A generation's first failure may blame no process, because no rank that was polled had ended: it
    is the reason for the abort and was seen then. Non-finite values are refused before the
    coordinator learns of them.
    """
    aborted: dict[int, int] = {}
    for abort in history.log.of(Kind.ABORT_SENT):
        aborted.setdefault(abort.generation, abort.time_ns)
    refused: dict[tuple[int, int | None], int] = {}
    for event in history.log.of(Kind.NONFINITE_CAUGHT):
        until_ns = event.time_ns + history.log.clocks.bound_ns(event)
        refused.setdefault((event.generation, event.step), until_ns)
    seen: dict[int, int] = {}
    for failure in failures:
        since_ns = aborted.pop(failure.generation, failure.time_ns)
        if _of_values(failure):
            since_ns = min(since_ns, refused.get((failure.generation, failure.step), since_ns))
        nameless = failure.data["process"] is None
        seen[id(failure)] = min(failure.time_ns, since_ns) if nameless else failure.time_ns
    return seen


def _first_of(episode: Episode, due: list[Event]) -> list[Event]:
    """The first failure after an episode that hit no named process, and failures of the same
    generation at the ends of its links: a rank that is also cut off from its supervisor does not
    leave an aborted generation.
    """
    ends = episode.target.get("processes")
    hit = set(ends.values()) if isinstance(ends, dict) else set()
    return due[:1] + [
        f for f in due[1:] if f.generation == due[0].generation and f.data["process"] in hit
    ]


def _explains(history: History, episode: Episode, failure: Event) -> bool:
    """Whether a failure blames what the episode hit, or, of values, a process that holds the state
    that it changed. An episode that acts everywhere also hits processes that joined later.
    """
    if episode.target.get("everywhere"):
        return _of_values(failure)
    if episode.may_be_blamed(failure):
        return True
    return _of_values(failure) and failure.data["process"] in changed_by(
        history, (episode,), failure
    )


def _ends(
    history: History,
    episodes: list[Episode],
    index: int,
    seen: Mapping[int, int],
    *,
    same_target: bool,
) -> Callable[[Event], float]:
    """Until when episode ``index`` may explain a failure. While values that it corrupted may still
    be refused, only another injection that corrupts values is a newer cause of that; of the same
    target, one that explains the failure itself: a process may hold the state as it was before.
    """
    until = _ends_of_any(history, episodes, index, seen, same_target=same_target)
    one = episodes[index]

    def ends(failure: Event) -> float:
        if not (one.corrupts and _of_values(failure) and _still_spoilt(history, one, failure)):
            return until(failure)

        def newer(other: Episode) -> bool:
            return other.corrupts and (not same_target or _explains(history, other, failure))

        hit = set(one.processes)
        spoilt = _until(episodes, index, hit, same_target=same_target, newer=newer)
        return max(spoilt, until(failure))

    return ends


def _still_spoilt(history: History, one: Episode, failure: Event) -> bool:
    """Whether values that an episode corrupted can be among those refused: in its step, or the next
    for values kept across steps; or, for a changed state, while a member holds it.
    """
    if one.injected is None:
        return False
    since, step = one.injected.generation, one.injected.step or 0
    if failure.generation == since and (failure.step or 0) <= step + 1:
        return True
    generation = history.generation(failure.generation)
    held = holders(history, one.processes, since, failure.generation)
    return one.changed_state and generation is not None and bool(held & set(generation.members))


def _ends_of_any(
    history: History,
    episodes: list[Episode],
    index: int,
    seen: Mapping[int, int],
    *,
    same_target: bool,
) -> Callable[[Event], float]:
    """Until when episode ``index`` may explain a failure.

    With several targets, each counts until it is hit again, as the others are unaffected. An
    episode that only changed values, acted beside the steps, or was over by then, neither explains
    a stuck job nor is a newer cause of one. One that makes a working rank appear stalled may make
    the job seem stuck, with no process to blame, until it is healed, whatever else is injected
    meanwhile.
    """
    one = episodes[index]
    hit = set(one.processes)
    whole = _until(episodes, index, hit, same_target=same_target)
    if not same_target:
        healed_ns = one.healed.time_ns if one.healed else float("inf")

        def until(failure: Event) -> float:
            if failure.data["cause"] not in _STUCK:
                return whole
            newer = partial(_stops, history, one, failure=failure, seen_ns=seen[id(failure)])
            stuck = _until(episodes, index, hit, same_target=False, newer=newer)
            stuck = float("-inf") if _stops_nothing(one) else stuck
            hidden = one.seems_still and _nameless_stall(failure)
            return max(stuck, healed_ns) if hidden else stuck

        return until
    if len(hit) < 2:
        return lambda failure: whole
    each = {name: _until(episodes, index, {name}, same_target=True) for name in hit}
    return lambda failure: each.get(failure.data["process"], whole)


def _stops(history: History, one: Episode, other: Episode, *, failure: Event, seen_ns: int) -> bool:
    """Whether ``other`` can have stopped the progress of a failure's generation until that was
    seen, rather than ``one``: what hit only processes that are no members of it cannot, and what
    slows a rank down is less likely than what breaks one in the same generation.
    """
    if _stops_nothing(other) or _was_over(other, failure, seen_ns):
        return False
    here = one.injected is not None and one.injected.generation == failure.generation
    if other.harmless and here and not one.harmless:
        return False
    generation = history.generation(failure.generation)
    hit = set(other.processes)
    return generation is None or not hit or bool(hit & set(generation.members))


def _stops_nothing(one: Episode) -> bool:
    """Whether it cannot stop progress, such as a mere change of values."""
    return one.changed or one.corrupts or one.beside_steps


def _was_over(one: Episode, failure: Event, seen_ns: int) -> bool:
    """Whether a fault had released its target before the silence began that the failure is for."""
    silent_s = failure.data.get("silent_s") or 0.0
    return failure.data["cause"] in _STUCK and seen_ns - silent_s * NS > one.over_ns


def _until(
    episodes: list[Episode],
    index: int,
    mine: set[str],
    *,
    same_target: bool,
    newer: Callable[[Episode], bool] = lambda other: True,
) -> float:
    """Time of the next injection after episode ``index`` that counts as ``newer`` (and is on the
    same target); infinity: there is none.
    """
    if episodes[index].target.get("everywhere"):
        return float("inf")  # another injection on one of its targets does not end it
    for other in episodes[index + 1 :]:
        if (
            other.injected is None
            or other.missed
            or (same_target and other.target.get("everywhere"))
        ):
            continue
        if not newer(other):
            continue
        if not same_target or mine & set(other.processes) or mine == set(other.processes):
            return other.injected.time_ns
    return float("inf")


def _spoilt_everywhere(episodes: list[Episode], index: int) -> float:
    """Time of the next injection that acts everywhere, which only corrupts values: from then on it
    explains non-finite ones.
    """
    later = (
        other
        for other in episodes[index + 1 :]
        if other.injected and other.target.get("everywhere")
    )
    return min((other.injected.time_ns for other in later if other.injected), default=float("inf"))


def _nameless_stall(failure: Event) -> bool:
    """Whether the job makes no progress and no process is to blame."""
    return failure.data["cause"] in _STUCK and failure.data["process"] is None


def _of_values(failure: Event) -> bool:
    return bool(failure.data["cause"] == "nonfinite")
