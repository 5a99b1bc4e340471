"""The claims of a judged arm, and which changes of its log alter them.

Counts, ranks, names and outcomes are either equal or altered. Times may differ by ``SLACK_S`` and
``SHARE``: the effect of writing one line a little earlier or later, and less than the differences
that people compare.

Durations follow from the times of two lines, and a log with a longer duration could come from
another run. So if only times of lines are changed, times and shares are not checked; but the log's
counts are, and the order of causes and effects (``backwards``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.measure import METRICS, ArmMeasures
from trainchaos.harness.judge.order.slip import SAME_CLOCK_S

SLACK_S = 0.05
SHARE = 0.1
COUNTED = ("steps", "samples", "replicas", "saves")
"""Units of metrics that are counts."""
DERIVED = ("failure_cost",)
"""Metrics that are a constant multiple of another metric."""
_NS = 1e9


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Claims of one arm. ``exact``: must stay equal; ``near``: metric -> values that may differ a
    little.
    """

    exact: Mapping[str, object]
    near: Mapping[str, Sequence[float]]


def claims_of(measures: ArmMeasures) -> Claims:
    """Everything that reports and verdicts are based on."""
    history = measures.history
    exact: dict[str, object] = {
        "outcome": history.outcome,
        "committed step": history.committed_step,
    }
    for number, incident in enumerate(measures.incidents):
        exact |= {f"{name} of incident {number}": value for name, value in _of(incident)}
    near: dict[str, Sequence[float]] = {}
    for name, values in measures.values.items():
        if METRICS[name].unit in COUNTED:
            exact[name] = tuple(values)
        elif name not in DERIVED:
            near[name] = tuple(values)
    return Claims(exact=exact, near=near)


def _of(incident: Incident) -> Iterator[tuple[str, object]]:
    names = (
        "fault",
        "kind",
        "occurrence",
        "landed",
        "healed",
        "outcome",
        "detected_by",
        "blamed_rank",
        "steps_lost",
        "restored_step",
        "first_new_step",
        "answered_with",
    )
    yield from ((name, getattr(incident, name)) for name in names)
    yield (
        "hits",
        tuple((hit.occurrence, hit.landed, hit.outcome, hit.detected_by) for hit in incident.hits),
    )


def altered(before: Claims, after: Claims, *, times: bool = True) -> list[str]:
    """Claims that differ, for people, counts and names first; ``times``: include times and
    shares.
    """
    found = []
    for name in dict.fromkeys((*before.exact, *after.exact)):
        was, now = before.exact.get(name), after.exact.get(name)
        if was != now:
            found.append(f"{name} was {was!r}, is {now!r}")
    for name in before.near if times else ():
        was_all, now_all = before.near[name], after.near[name]
        if len(was_all) != len(now_all):
            found.append(f"{name} had {len(was_all)} values, has {len(now_all)}")
        for old, new in zip(was_all, now_all, strict=False):
            if not alike(old, new):
                found.append(f"{name} was {old:.6g}, is {new:.6g}")
                break
    return found


def alike(old: float, new: float) -> bool:
    """Whether two values are equal within the tolerance."""
    if not (math.isfinite(old) and math.isfinite(new)):
        return old == new or (math.isnan(old) and math.isnan(new))
    return abs(new - old) <= SLACK_S + SHARE * abs(old)


# ---- order of events

Moment = tuple[str, int]
"""An event's description, and its time."""


def backwards(log: Log) -> set[str]:
    """Effects before their causes, by more than one clock's error. Uses only what any reader of a
    log knows, not the judge's own rules.
    """
    slack_ns = SAME_CLOCK_S * _NS
    return {
        f"{then[0]} before {first[0]}"
        for first, then in _pairs(log)
        if then[1] < first[1] - slack_ns
    }


def _pairs(log: Log) -> Iterator[tuple[Moment, Moment]]:
    yield from _of_faults(log)
    yield from _of_lives(log)
    yield from _of_generations(log)
    for cause, effect, by_step in (
        (Kind.BATCH_TAKEN, Kind.STEP_COMMITTED, True),
        (Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_COMMITTED, False),
    ):
        begun = {_key(event, by_step): event for event in log.of(cause)}
        for event in log.of(effect):
            if (first := begun.get(_key(event, by_step))) is not None:
                yield _at(first, event.actor), _at(event, event.actor)


def _key(event: Event, by_step: bool) -> tuple[object, ...]:
    what = event.step if by_step else (str(event.data["checkpoint"]), event.data.get("shard"))
    return event.actor, event.generation, what


def _at(event: Event, whose: object) -> Moment:
    return f"{event.kind.value} of {whose}", event.time_ns


def _of_faults(log: Log) -> Iterator[tuple[Moment, Moment]]:
    planned = {event.data["fault"]: event for event in log.of(Kind.FAULT_PLANNED)}
    injected: dict[object, Event] = {}
    for event in log.of(Kind.FAULT_INJECTED):
        name = event.data["fault"]
        injected[name, event.data["occurrence"]] = event
        if name in planned:
            yield _at(planned[name], name), _at(event, name)
    for event in log.of(Kind.FAULT_LANDED, Kind.FAULT_HEALED, Kind.FAULT_FAILED):
        key = (event.data["fault"], event.data["occurrence"])
        if key in injected:
            yield _at(injected[key], key[0]), _at(event, key[0])


def _of_lives(log: Log) -> Iterator[tuple[Moment, Moment]]:
    ends = {event.data["process"]: event for event in log.of(Kind.PROCESS_EXITED)}
    for name, event in ends.items():
        if lines := log.by(str(name)):
            yield _at(lines[-1], name), _at(event, name)
    for failure in log.of(Kind.FAILURE_DETECTED):
        name = failure.data["process"]
        if failure.data["cause"] == "exit" and name in ends:
            yield _at(ends[name], name), _at(failure, name)


def _of_generations(log: Log) -> Iterator[tuple[Moment, Moment]]:
    started = {event.generation: event for event in log.of(Kind.GENERATION_STARTED)}
    ready = {event.generation: event for event in log.of(Kind.GENERATION_READY)}
    formed = {(event.generation, event.actor): event for event in log.of(Kind.GROUP_FORMED)}
    for (number, actor), event in formed.items():
        if number in started:
            yield _at(started[number], number), _at(event, (number, actor))
    for event in log.of(Kind.STATE_READY):
        key = (event.generation, event.actor)
        if key in formed:
            yield _at(formed[key], key), _at(event, key)
        if event.generation in ready:
            yield _at(event, key), _at(ready[event.generation], event.generation)
    parked = {(event.generation, event.actor): event for event in log.of(Kind.PARKED)}
    for event in log.of(Kind.SURVIVORS_PARKED):
        for name in event.data["processes"]:
            if (one := parked.get((event.generation, name))) is not None:
                yield _at(one, name), _at(event, event.generation)
