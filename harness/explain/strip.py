"""An event log without what the fault injection wrote in it: what a job would have left if the same
had happened by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Log, make_log
from trainchaos.chaos.fault.targets import EMULATED

HIDDEN = frozenset(
    {
        Kind.FAULT_PLANNED,
        Kind.FAULT_INJECTED,
        Kind.FAULT_LANDED,
        Kind.FAULT_FAILED,
        Kind.FAULT_HEALED,
        Kind.FAULT_EFFECT,
        Kind.CLOCK_MEASURED,
        Kind.STACKS_DUMPED,
    }
)
"""Kinds of events that are left out. Clocks were corrected when the log was read, and would be
corrected again. The innermost frame of a hang that was injected is the injection's.
"""
BETRAYING = ("inject", "emulat")
"""Parts of words that only an injected fault leaves in an error's text."""
NEUTRAL_TYPE = "RuntimeError"
NEUTRAL_MESSAGE = "an error of the training code"


def strip(log: Log) -> Log:
    """The log without fault events and without words that name an injected fault. Events are
    numbered anew, so that no gap tells where one was; whether the run was to be faulted, and the
    name of its cell, are left out as well.
    """
    kept = {
        name: [event for event in actor.events if event.kind not in HIDDEN]
        for name, actor in log.actors.items()
    }
    before = {name: [event.seq for event in events] for name, events in kept.items()}
    hidden = [e.time_ns for e in log.by(ORCHESTRATOR) if e.kind in HIDDEN]
    actors = [
        ActorLog(
            actor=name,
            events=tuple(
                replace(event, seq=number, data=_data(event, before, hidden))
                for number, event in enumerate(events)
            ),
            problems=(),
            ended=log.actors[name].ended,
            unread=log.actors[name].unread,
        )
        for name, events in kept.items()
    ]
    return make_log(actors)


def _data(event: Event, before: Mapping[str, list[int]], hidden: list[int]) -> Mapping[str, Any]:
    """An event's data, with nothing of the injection."""
    data = {name: _neutral(value) for name, value in event.data.items()}
    match event.kind:
        case Kind.RUN_STARTED:
            return {**data, "arm": "control", "cell": "exam", "repeat": 0}
        case Kind.HEALTH_REPORTED:
            return {**data, "source": "nvml"}
        case Kind.ERROR_RAISED if NEUTRAL_MESSAGE in data.values():
            return {**data, "type": NEUTRAL_TYPE, "message": NEUTRAL_MESSAGE}
        case Kind.COORDINATOR_ADOPTED if type(data["events"]) is int:
            return {**data, "events": data["events"] - bisect_right(hidden, event.time_ns)}
        case Kind.PROCESS_EXITED | Kind.FAILURE_DETECTED if type(data.get("last_seq")) is int:
            numbers = before.get(str(data["process"]), [])
            return {**data, "last_seq": bisect_right(numbers, data["last_seq"]) - 1}
    return data


def _neutral(value: Any) -> Any:
    """A value with no text that betrays the injection."""
    if isinstance(value, str):
        value = value.replace(EMULATED, "")
        return NEUTRAL_MESSAGE if any(part in value.lower() for part in BETRAYING) else value
    if isinstance(value, Mapping):
        return {name: _neutral(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_neutral(inner) for inner in value]
    return value
