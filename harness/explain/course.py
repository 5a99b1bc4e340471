"""The course of one incident in its arm's log: the hit, what first showed it, the declaration, the
decision, and when the job was back at work. Computed from events alone. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log

SIGNALS = (
    Kind.PROCESS_EXITED,
    Kind.ERROR_RAISED,
    Kind.NONFINITE_CAUGHT,
    Kind.HEALTH_REPORTED,
    Kind.CHECKPOINT_FAILED,
    Kind.CHECKPOINT_REFUSED,
    Kind.NODE_LOST,
    Kind.COORDINATOR_ADOPTED,
    Kind.FAILURE_DETECTED,
)
"""What first shows that something is wrong."""
LONGEST = 200  # characters of what is told of one event


class Moment(BaseModel):
    """One line of a timeline. ``at_s``: seconds since the run began; ``who``: the process it is
    about, or whoever says it.
    """

    model_config = ConfigDict(frozen=True)

    at_s: float
    what: str
    who: str | None = None


@dataclass(frozen=True, kw_only=True)
class Course:
    """What followed a hit. ``moments``: in order of time, the hit first; ``signal``: the first
    event that shows that something is wrong, None: there was none; ``failure``: the first that was
    declared, None: none was; ``cost_s``: seconds from the hit until the job had committed more
    steps than before, None: it never had; ``steps_redone``: committed before, and done again.
    """

    moments: tuple[Moment, ...]
    signal: Moment | None
    failure: Event | None
    cost_s: float | None
    steps_redone: int


def course_of(
    log: Log, hit_ns: int, what: str, failure: Event | None, until_ns: float = float("inf")
) -> Course:
    """The course of an incident that hit at ``hit_ns`` (monotonic, of the log). ``what``: words for
    the hit; ``failure``: the first that it caused; ``until_ns``: signs after this moment are of
    something else.
    """
    started = log.first(Kind.RUN_STARTED)
    start_ns = started.time_ns if started else 0
    commits = list(log.of(Kind.STEP_COMMITTED))
    before = max((e.step or 0 for e in commits if e.time_ns <= hit_ns), default=0)
    over = next((e for e in commits if e.time_ns > hit_ns and (e.step or 0) > before), None)
    declared = failure.time_ns if failure else hit_ns
    answered = [
        event
        for kind in (Kind.DECISION, Kind.GENERATION_STARTED, Kind.GENERATION_READY)
        if failure and (event := first_of(log, declared, kind))
    ]
    signal = next(
        (e for e in log.of(*SIGNALS) if hit_ns <= e.time_ns <= until_ns and _tells(e)), None
    )
    shown = [one for one in (signal, failure, *answered, over) if one]
    resumed = next((e for e in answered if e.kind is Kind.GENERATION_READY), None)
    last = max((e.step or 0 for e in commits if e.time_ns <= declared), default=0)
    unique = {(event.actor, event.seq): event for event in shown}
    moments = [_moment(event, start_ns) for event in sorted(unique.values(), key=_time)]
    return Course(
        moments=(Moment(at_s=round((hit_ns - start_ns) / 1e9, 6), what=what), *moments),
        signal=_moment(signal, start_ns) if signal else None,
        failure=failure,
        cost_s=round((over.time_ns - hit_ns) / 1e9, 6) if over else None,
        steps_redone=max(0, last - (resumed.step or 0)) if resumed else 0,
    )


def first_of(log: Log, since_ns: int, kind: Kind) -> Event | None:
    """The first event of a kind at that moment or later; None: there is none."""
    return next((event for event in log.of(kind) if event.time_ns >= since_ns), None)


def _tells(event: Event) -> bool:
    return event.kind is not Kind.PROCESS_EXITED or not event.data["expected"]


def _time(event: Event) -> int:
    return event.time_ns


def _moment(event: Event, start_ns: int) -> Moment:
    words = event.data.get("detail") or event.data.get("reason") or ""
    what = event.kind.value.replace("_", " ") + (f": {words}" if words else "")
    if event.step is not None:
        what += f" (step {event.step})"
    who = event.data.get("process") if "process" in event.data else event.actor
    at_s = round((event.time_ns - start_ns) / 1e9, 6)
    return Moment(at_s=at_s, what=what[:LONGEST], who=who)
