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

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.commands import take_ends
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
    landed, failed, healed, effects = (
        {(e.data["fault"], e.data["occurrence"]): e for e in reversed([*log.of(kind)])}
        for kind in (
            *(Kind.FAULT_LANDED, Kind.FAULT_FAILED),
            *(Kind.FAULT_HEALED, Kind.FAULT_EFFECT),
        )
    )
    found: list[Episode] = []
    for event in log.of(Kind.FAULT_INJECTED):
        key = (event.data["fault"], event.data["occurrence"])
        if key in failed and failed[key].data.get("again"):
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
                landed=landed.get(key),
                failed=failed.get(key),
                healed=healed.get(key),
                processes=processes_hit(event) or ((process,) if process is not None else ()),
                replica=_replica(history, event, process),
                over_ns=_over_ns(history, effects.get(key)),
            )
        )
    fired = {episode.fault for episode in found}
    idle = [
        Episode(
            fault=name,
            kind=event.data["kind"],
            occurrence=NEVER_FIRED,
            target=dict(event.data["target"] or {}),
            planned=event,
        )
        for name, event in planned.items()
        if name not in fired
    ]
    return (*_with_failures(history, found), *idle)


def unclaimed_failures(history: History, episodes: Iterable[Episode]) -> list[Event]:
    """Failures that no episode explains."""
    claimed = {id(failure) for episode in episodes for failure in episode.failures}
    return [event for event in history.log.of(Kind.FAILURE_DETECTED) if id(event) not in claimed]


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
        return math.inf
    return effect.time_ns + held_s * NS + history.log.clocks.bound_ns(effect)


def _with_failures(history: History, episodes: list[Episode]) -> list[Episode]:
    failures = list(history.log.of(Kind.FAILURE_DETECTED))
    pairing = _Pairing(history, episodes, _seen(history, failures))
    paired: dict[int, list[Event]] = {}
    states = explained_by_state(history, episodes)
    left = [f for f in failures if not any(f in found for found in states.values())]
    for direct in (True, False):
        for index, episode in enumerate(episodes):
            # Explaining a divergence does not exclude values too large to blame on a rank.
            values_too = not direct and paired.get(index) == states.get(index, [])
            # Nor does being declared hung exclude that the job seemed stuck before that.
            stuck_too = not direct and episode.seems_still
            taken = index in paired
            if (taken and not (values_too or stuck_too)) or not episode.injected or episode.missed:
                continue
            due = [
                f
                for f in left
                if pairing.may_explain(index, f, direct=direct)
                and (_of_values(f) or not taken or (stuck_too and _nameless_stall(f)))
            ]
            if direct:
                found = [f for f in due if _explains(history, episode, f)]
            else:
                stalls = [f for f in due if stuck_too and _nameless_stall(f)]
                found = stalls or _first_of(episode, due)
            found += paired.get(index, states.get(index, []))
            if found:
                found.sort(key=lambda f: (f.data["process"] not in episode.processes, f.time_ns))
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


@dataclass(frozen=True)
class _Pairing:
    """Which injection may explain which failure, by when others came between. ``seen``: see
    ``_seen``.
    """

    history: History
    episodes: Sequence[Episode]
    seen: dict[int, int]

    def may_explain(self, index: int, failure: Event, *, direct: bool) -> bool:
        """Whether a failure came after an injection, and before a newer cause. ``direct``: it
        blames the target, so that only others on the same target are newer.
        """
        one, seen_ns = self.episodes[index], self.seen[id(failure)]
        if one.injected is None or seen_ns < one.injected.time_ns:
            return False
        over = _was_over(one, failure, seen_ns)
        return not over and seen_ns < self._end(index, failure, direct=direct)

    def _end(self, index: int, failure: Event, *, direct: bool) -> float:
        """Until when an episode may explain a failure.

        Of several targets, each counts until it is hit again. An episode that only changed values,
        acted beside the steps, or was over by then, neither explains a stuck job nor is a newer
        cause of one; one that makes a working rank appear stalled may until it is healed, whatever
        else is injected. While values that it corrupted may still be refused, only another that
        corrupts values is newer; one that acts everywhere explains them from then on.
        """
        one, name = self.episodes[index], failure.data["process"]
        hit, values = set(one.processes), _of_values(failure)
        if failure.data["cause"] in _STUCK and not direct:
            end = -math.inf
            if not _stops_nothing(one):
                end = self._next(index, (), lambda other: self._stops(one, other, failure))
            if one.seems_still and _nameless_stall(failure):
                end = max(end, one.healed.time_ns if one.healed else math.inf)
        else:
            mine = ({name} if name in hit else hit) if direct else ()
            end = self._next(index, mine, direct=direct)
        if one.corrupts and values and self._still_spoilt(one, failure):

            def newer(other: Episode) -> bool:
                return other.corrupts and (not direct or _explains(self.history, other, failure))

            end = max(end, self._next(index, hit, newer, direct=direct))
        if direct and values:
            later = self.episodes[index + 1 :]
            all_hit = (o.injected for o in later if o.injected and o.target.get("everywhere"))
            end = min(end, min((event.time_ns for event in all_hit), default=math.inf))
        return end

    def _next(
        self,
        index: int,
        mine: Collection[str],
        newer: Callable[[Episode], bool] = lambda other: True,
        *,
        direct: bool = False,
    ) -> float:
        """Time of the next injection that counts as ``newer``; ``direct``: on the same target."""
        if self.episodes[index].target.get("everywhere"):
            return math.inf  # another injection on one of its targets does not end it
        for other in self.episodes[index + 1 :]:
            if other.injected is None or other.missed or not newer(other):
                continue
            theirs = set(other.processes)
            same = not other.target.get("everywhere") and (
                bool(theirs & set(mine)) or theirs == set(mine)
            )
            if same or not direct:
                return other.injected.time_ns
        return math.inf

    def _stops(self, one: Episode, other: Episode, failure: Event) -> bool:
        """Whether ``other`` can have stopped the progress of a failure's generation until that was
        seen, rather than ``one``: what hit only processes that are no members of it cannot, and
        what slows a rank down is less likely than what breaks one in the same generation.
        """
        if _stops_nothing(other) or _was_over(other, failure, self.seen[id(failure)]):
            return False
        here = one.injected is not None and one.injected.generation == failure.generation
        if other.harmless and here and not one.harmless:
            return False
        generation, hit = self.history.generation(failure.generation), set(other.processes)
        return generation is None or not hit or bool(hit & set(generation.members))

    def _still_spoilt(self, one: Episode, failure: Event) -> bool:
        """Whether values that an episode corrupted can be among those refused: in its step, or the
        next for values kept across steps; or, for a changed state, while a member holds it.
        """
        if one.injected is None:
            return False
        since, step = one.injected.generation, one.injected.step or 0
        if failure.generation == since and (failure.step or 0) <= step + 1:
            return True
        generation = self.history.generation(failure.generation)
        held = holders(self.history, one.processes, since, failure.generation)
        return one.changed_state and generation is not None and bool(held & set(generation.members))


def _stops_nothing(one: Episode) -> bool:
    """Whether it cannot stop progress, such as a mere change of values."""
    return one.changed or one.corrupts or one.beside_steps


def _was_over(one: Episode, failure: Event, seen_ns: int) -> bool:
    """Whether a fault had released its target before the silence began that the failure is for."""
    silent_s = failure.data.get("silent_s") or 0.0
    return failure.data["cause"] in _STUCK and seen_ns - silent_s * NS > one.over_ns


def _nameless_stall(failure: Event) -> bool:
    """Whether the job makes no progress and no process is to blame."""
    return failure.data["cause"] in _STUCK and failure.data["process"] is None


def _of_values(failure: Event) -> bool:
    return bool(failure.data["cause"] == "nonfinite")


@dataclass(frozen=True, kw_only=True)
class AlarmRaised:
    """One alarm. ``place``: for people; ``by``: the occurrences that acted before it and hit the
    rank, device or node that it names (any that acted before it, where it names the job alone).
    """

    event: Event
    what: str
    place: str
    by: tuple[Episode, ...]


def alarms_of(history: History, episodes: Sequence[Episode]) -> list[AlarmRaised]:
    """All alarms of an arm, in time order."""
    devices = {
        event.data["process"]: event.data.get("device")
        for event in history.log.of(Kind.PROCESS_SPAWNED)
    }
    found = []
    for event in history.log.of(Kind.HEALTH_ALARM):
        by = tuple(
            one
            for one in episodes
            if one.injected is not None
            and one.injected.time_ns <= event.time_ns
            and _names(history, one, event, {devices.get(name) for name in one.processes})
        )
        found.append(
            AlarmRaised(event=event, what=str(event.data["what"]), place=_place(event), by=by)
        )
    return found


def unexplained(history: History, episodes: Sequence[Episode]) -> list[AlarmRaised]:
    """Alarms that no fault explains: false ones, or of something that happened by itself."""
    return [alarm for alarm in alarms_of(history, episodes) if not alarm.by]


def steps_until(history: History, episode: Episode, alarm: Event) -> int:
    """Steps that any rank had committed between a fault and an alarm."""
    assert episode.injected is not None
    since, until = episode.injected.time_ns, alarm.time_ns
    done = {
        event.step for event in history.log.of(Kind.STEP_COMMITTED) if since < event.time_ns < until
    }
    return len(done)


def _names(history: History, one: Episode, alarm: Event, devices: set[object]) -> bool:
    """Whether an alarm names what an occurrence hit: the smallest place that it names counts."""
    rank, device, node = (alarm.data.get(key) for key in ("rank", "device", "node"))
    if rank is not None:
        return rank in set(_ranks(history, one, alarm))
    if device is not None:
        return device in devices or device == one.target.get("device")
    return node is None or node == one.target.get("node")


def _ranks(history: History, one: Episode, alarm: Event) -> Iterator[int]:
    """The ranks that an occurrence hit: then, and what its processes are as the alarm is raised."""
    if one.rank is not None:
        yield one.rank
    several = one.target.get("ranks")
    if isinstance(several, list):
        yield from several
    for at_ns in (one.injected.time_ns if one.injected else 0, alarm.time_ns):
        generation = history.generation_at(at_ns)
        if generation is not None:
            for rank, name in enumerate(generation.members):
                if name in one.processes:
                    yield rank


def _place(event: Event) -> str:
    named = [
        f"{key} {event.data[key]}"
        for key in ("rank", "device", "node")
        if event.data.get(key) is not None
    ]
    return ", ".join(named) or "the job"
