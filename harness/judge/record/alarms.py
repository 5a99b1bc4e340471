"""Alarms of health detectors in a log, and which of them a fault explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import History


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
