"""The course of one incident in its arm's log: the hit, what first showed it, the declaration, the
decision, and when the job was back at work. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
ANSWERS = (Kind.DECISION, Kind.GENERATION_STARTED, Kind.GENERATION_READY)
LONGEST = 200  # characters of what is told of one event


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One line of a timeline. ``at_s``: seconds since the run began; ``who``: the process it is
    about, or whoever says it.
    """

    at_s: float
    what: str
    who: str | None = None


def course_of(
    log: Log, hit_ns: int, what: str, failure: Event | None, until_ns: float
) -> tuple[tuple[Moment, ...], Moment | None]:
    """The moments of an incident that hit at ``hit_ns`` (monotonic, of the log), in order of time,
    and the first that shows that something is wrong; None: none does. ``what``: words for the hit,
    which comes first; ``failure``: the first that it caused; ``until_ns``: signs after this moment
    are of something else.
    """
    started = log.first(Kind.RUN_STARTED)
    start_ns = started.time_ns if started else 0
    signal = next(
        (e for e in log.of(*SIGNALS) if hit_ns <= e.time_ns <= until_ns and _tells(e)), None
    )
    commits = list(log.of(Kind.STEP_COMMITTED))
    before = max((e.step or 0 for e in commits if e.time_ns <= hit_ns), default=0)
    over = next((e for e in commits if e.time_ns > hit_ns and (e.step or 0) > before), None)
    answers = _answers(log, failure) if failure else ()
    shown = {(e.actor, e.seq): e for e in (signal, failure, *answers, over) if e}
    moments = [_moment(e, start_ns) for e in sorted(shown.values(), key=lambda e: e.time_ns)]
    hit = Moment(at_s=round((hit_ns - start_ns) / 1e9, 6), what=what)
    return (hit, *moments), _moment(signal, start_ns) if signal else None


def _answers(log: Log, failure: Event) -> Iterator[Event | None]:
    """The first event of each kind that answers a failure."""
    for kind in ANSWERS:
        yield next((event for event in log.of(kind) if event.time_ns >= failure.time_ns), None)


def _tells(event: Event) -> bool:
    return event.kind is not Kind.PROCESS_EXITED or not event.data["expected"]


def _moment(event: Event, start_ns: int) -> Moment:
    words = event.data.get("detail") or event.data.get("reason") or ""
    what = event.kind.value.replace("_", " ") + (f": {words}" if words else "")
    if event.step is not None:
        what += f" (step {event.step})"
    who = event.data.get("process") if "process" in event.data else event.actor
    at_s = round((event.time_ns - start_ns) / 1e9, 6)
    return Moment(at_s=at_s, what=what[:LONGEST], who=who)
