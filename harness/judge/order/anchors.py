"""Anchors of an injection in time: what had been done before it, and what had not.

``fault_injected`` is written while ranks hold at the point that it names. So the point is in the
log twice: by the injector's clock, and by what the ranks wrote before they reached it and after
they left. If no rank holds, it is written when its condition was seen, never before:

- A rank that holds in step s has taken its batch of s, and commits s afterwards; at a save it has
  committed s, and takes its next batch afterwards. If the target is not a rank, all ranks of the
  generation hold.
- A command without a point there is seen to be in step s when it reports s - 1 in this generation.
- A fault that no rank held for, and a late one, came when the steps before the one in which it was
  noticed were done.
- A fault by time waits for that time from the start of training, one by event for that occurrence
  of the event.

A rank that held for too long and was released may be anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.plugins import FAULTS, load
from trainchaos.chaos.schedule.plan import DEFAULT_PHASE
from trainchaos.harness.judge.record.history import NS, History

Pair = tuple[Event, Event, str, int]
"""Earlier and later event, message if out of order, and the least time between them in ns."""

ROUNDED_NS = 1000  # seconds in the log have six digits
SAVES = "checkpoint"
_UNANSWERED = "nobody answered"
_Done = Mapping[tuple[str, int, Kind, int], tuple[Event, Event]]
"""(process, generation, kind, step) -> the first and the last such event."""


def injection_pairs(history: History) -> Iterator[Pair]:
    """Pairs of all injections."""
    log = history.log
    planned = {event.data["fault"]: event.data for event in log.of(Kind.FAULT_PLANNED)}
    void, let_go = _void(log), _let_go(log)
    injected = [
        e
        for e in log.of(Kind.FAULT_INJECTED)
        if (e.data["fault"], e.data["occurrence"]) not in void
    ]
    done, reports = _done(log, injected), _reports(log)
    reached = {} if _lossy(log) else _first_reached(log)
    mine: dict[str, list[Event]] = {name: [] for name in planned}
    for event in injected:
        name = event.data["fault"]
        if name not in planned:
            continue
        mine[name].append(event)
        if event.step is None or event.data.get("late_steps"):
            yield from _unheld(event, planned[name], reached)
        elif history.info.observed:
            yield from _reported(event, planned[name], reports)
        elif name not in let_go:
            yield from _held(history, event, planned[name], done)
    for name, plan in planned.items():
        yield from _by_time(history, mine[name], plan["at"])
        yield from _by_event(log, mine[name], plan["at"])


def _void(log: Log) -> set[tuple[str, int]]:
    """Occurrences that never acted and were armed again."""
    return {
        (event.data["fault"], event.data["occurrence"])
        for event in log.of(Kind.FAULT_FAILED)
        if event.data.get("again")
    }


def _let_go(log: Log) -> set[str]:
    """Faults for which a rank held and went on by itself, so that the answer may have come after it
    had left.
    """
    failed = log.of(Kind.FAULT_FAILED)
    return {event.data["fault"] for event in failed if _UNANSWERED in event.data["reason"]}


def _lossy(log: Log) -> bool:
    """Whether lines may be missing, so that the first known event may not be the first."""
    return bool(log.problems) or log.has_dropped or log.first(Kind.NODE_LOST) is not None


def _done(log: Log, injected: Iterable[Event]) -> _Done:
    """What the ranks did in the steps in which ranks are said to have held, and in the steps next
    to them.
    """
    steps = {step for event in injected if event.step is not None for step in _around(event.step)}
    for event in log.of(Kind.FAULT_PLANNED):
        steps |= {
            step for point in event.data["at"].get("points") or () for step in _around(point[0])
        }
    found: dict[tuple[str, int, Kind, int], tuple[Event, Event]] = {}
    for event in log.of(Kind.BATCH_TAKEN, Kind.STEP_COMMITTED) if steps else ():
        if event.step in steps:
            key = (event.actor, event.generation, event.kind, event.step)
            found[key] = (found[key][0] if key in found else event, event)
    return found


def _around(step: int) -> tuple[int, ...]:
    return step - 1, step, step + 1


def _first_reached(log: Log) -> Mapping[int, Event]:
    """Step -> the event that first showed that a rank had done it."""
    found: dict[int, Event] = {}
    for event in log.of(Kind.STEP_COMMITTED, Kind.STEP_REPORTED):
        if event.step is not None:
            found.setdefault(event.step, event)
    return found


# ---- by step


def _held(history: History, event: Event, plan: Mapping[str, Any], done: _Done) -> Iterator[Pair]:
    """The ranks that held had begun the step and had not passed the point."""
    point = _point(event, plan)
    if point is None:
        return
    step, phases = point
    at_save, in_step = phases == {SAVES}, bool(phases) and SAVES not in phases
    for process in _holders(history, event, plan):
        seen = partial(_seen, done, process, event.generation)
        before = (seen(Kind.STEP_COMMITTED, step) if at_save else None) or seen(
            Kind.BATCH_TAKEN, step
        )
        before = before or seen(Kind.STEP_COMMITTED, step - 1)
        after = (seen(Kind.STEP_COMMITTED, step) if in_step else None) or seen(
            Kind.BATCH_TAKEN, step + 1
        )
        name = f"{event.data['fault']} was injected in step {step}"
        if before is not None:
            what = "taken its batch of it" if before[0].kind is Kind.BATCH_TAKEN else "committed"
            text = f"{name} before {process} had {what}"
            yield before[0], event, f"{text} {before[0].step}" if what == "committed" else text, 0
        if after is not None:
            what = "committed it" if after[1].kind is Kind.STEP_COMMITTED else "begun the next"
            yield event, after[1], f"{name} after {process} had {what}", 0


def _seen(
    done: _Done, process: str, generation: int, kind: Kind, step: int
) -> tuple[Event, Event] | None:
    return done.get((process, generation, kind, step))


def _point(event: Event, plan: Mapping[str, Any]) -> tuple[int, set[str]] | None:
    """The step in which ranks held, and the phases at which they may have (empty: unknown). A fault
    on a checkpoint names the checkpoint's step instead.
    """
    points = [(step, phase) for step, phase in plan["at"].get("points") or ()]
    if "checkpoint" in (event.data["target"] or {}):
        return (points[0][0], {points[0][1]}) if len(points) == 1 else None
    if event.step is None:
        return None
    if points and event.step not in {step for step, _ in points}:
        return None  # not as planned, which another checker reports
    return event.step, {phase for step, phase in points if step == event.step}


def _holders(history: History, event: Event, plan: Mapping[str, Any]) -> Sequence[str]:
    """Processes that are known to have held: all present ranks if the target is not a rank, else
    those that were hit.
    """
    target, aims = event.data["target"] or {}, plan["target"]
    generation = history.generation(event.generation)
    if "ranks" in aims and not aims["ranks"] and plan["at"].get("points"):
        absent = event.data.get("absent") or ()
        return [name for name in generation.members if name not in absent] if generation else ()
    several = target.get("processes")
    named = several if isinstance(several, list) else [target.get("process")]
    return [
        name
        for name in named
        if isinstance(name, str) and generation and name in generation.members
    ]


def _reports(log: Log) -> Mapping[int, Sequence[Event]]:
    found: dict[int, list[Event]] = {}
    for event in log.of(Kind.STEP_REPORTED):
        found.setdefault(event.generation, []).append(event)
    return found


def _reported(
    event: Event, plan: Mapping[str, Any], reports: Mapping[int, Sequence[Event]]
) -> Iterator[Pair]:
    """A command without such a point was seen to be there by its reports."""
    step, kind = event.step or 0, load(FAULTS, Fault).get(event.data["kind"])
    phases = {phase for at, phase in plan["at"].get("points") or () if at == step}
    if kind is None or kind.where is Where.RANK or phases != {DEFAULT_PHASE} or step <= 1:
        return
    mine = reports.get(event.generation, ())
    first = next((report for report in mine if (report.step or 0) >= step - 1), None)
    if first is not None:
        text = (
            f"{event.data['fault']} was injected in step {step} before step {step - 1} was reported"
        )
        yield first, event, text, 0


def _unheld(event: Event, plan: Mapping[str, Any], reached: Mapping[int, Event]) -> Iterator[Pair]:
    """No rank held: the step counter had seen the steps before the planned one, and more if the
    fault came late.
    """
    points = plan["at"].get("points") or ()
    done = min((step for step, _ in points), default=1) - 1 + event.data.get("late_steps", 0)
    if points and (shown := reached.get(done)) is not None:
        yield (
            shown,
            event,
            f"{event.data['fault']} was injected before any rank had done step {done}",
            0,
        )


# ---- by time and by event


def _by_time(history: History, injected: Sequence[Event], at: Mapping[str, Any]) -> Iterator[Pair]:
    """No act comes before its time; if only the first is repeated, none before the first time."""
    times_s = sorted(at.get("times_s") or ())
    began = history.log.first(
        Kind.STEP_REPORTED if history.info.observed else Kind.GENERATION_READY
    )
    if began is None or not times_s:
        return
    for number, event in _numbered(injected):
        time_s = times_s[min(number, len(times_s) - 1) if at.get("fires") == 1 else 0]
        text = f"{event.data['fault']} was injected before its time"
        yield began, event, text, round(time_s * NS) - ROUNDED_NS


def _by_event(log: Log, injected: Sequence[Event], at: Mapping[str, Any]) -> Iterator[Pair]:
    """No act comes before the occurrence that it waits for."""
    name = at.get("event")
    if name is None or (name.startswith(SAVES) and _lossy(log)):
        return
    events = list(_named(log, name))
    for number, event in _numbered(injected):
        number += at.get("nth", 1) - 1
        if number < len(events):
            text = f"{event.data['fault']} was injected before the {name} that it waits for"
            yield events[number], event, text, 0


def _numbered(injected: Sequence[Event]) -> Iterator[tuple[int, Event]]:
    """Each injection with the number of acts before its own; 0 in a log without acts."""
    acts: set[int] = set()
    for event in injected:
        if (act := event.data.get("act")) is not None:
            acts.add(act)
        yield max(0, len(acts) - 1), event


def _named(log: Log, name: str) -> Iterator[Event]:
    """The occurrences of a trigger's event; may include some that the injector did not count."""
    kinds = {
        "checkpoint_saving": Kind.CHECKPOINT_SAVING,
        "checkpoint_committed": Kind.CHECKPOINT_COMMITTED,
        "recovery_started": Kind.FAILURE_DETECTED,
        "recovered": Kind.GENERATION_READY,
        "place_checked": Kind.PLACE_CHECKED,
    }
    if name in kinds:
        yield from (e for e in log.of(kinds[name]) if name != "recovered" or e.generation > 1)
    elif name in ("regroup", "restore"):
        for event in log.of(Kind.GENERATION_STARTED):
            if event.generation > 1 if name == "regroup" else event.data["state"] == "checkpoint":
                yield event
